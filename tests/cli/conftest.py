from track.conftest import make_step as make_step

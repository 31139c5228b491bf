"""One record per step, written once and fed to every tracker."""

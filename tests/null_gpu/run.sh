#!/usr/bin/env bash
# run.sh COMMAND...: runs a command of the environment with torch's CUDA build on cards whose kernels do nothing (README.md says
# which variables). The libraries are built here when their sources are newer. NULL_VENV names the environment (.venv-null).
set -eu
here=$(cd "$(dirname "$0")" && pwd)
venv=$(cd "${NULL_VENV:-$here/../../.venv-null}" && pwd)
out=$here/build
build() {
  include=$(dirname "$(find "$venv" -path '*nvidia/cu*/include/cuda_runtime_api.h' -print -quit)")
  g++ -std=c++17 -O1 -fPIC -c -I"$include" "$here/native/nullcuda.cpp" -o "$out/nullcuda.o"
  g++ -std=c++17 -O1 -fPIC -c "$here/native/late.cpp" -o "$out/late.o"
  gcc -O1 -fPIC -w -c "$here/native/blas.c" -o "$out/blas.o"
  g++ -shared -o "$out/libnullcuda.so" "$out/nullcuda.o" "$out/late.o" "$out/blas.o" -ldl
  g++ -std=c++17 -O1 -fPIC -c -I"$include" "$here/native/driver.cpp" -o "$out/driver.o"
  gcc -O1 -fPIC -w -c "$here/native/driver_rest.c" -o "$out/driver_rest.o"
  g++ -shared -Wl,-soname,libcuda.so.1 -o "$out/libcuda.so.1" "$out/driver.o" "$out/driver_rest.o"
  ln -sf libcuda.so.1 "$out/libcuda.so"
  g++ -std=c++17 -O1 -shared -fPIC -o "$out/libnvidia-ml.so.1" "$here/native/nvml.cpp"
  rm "$out"/*.o
  touch "$out/.built"
}
mkdir -p "$out"
# Tests start at once, so one builds and the others wait. The lock ends with this block.
{
  flock 9
  if [ ! -e "$out/.built" ] || [ -n "$(find "$here/native" -newer "$out/.built" -print -quit)" ]; then build; fi
} 9>"$out/.lock"
export NULLCUDA_LIB=$out/libnullcuda.so TRITON_LIBCUDA_PATH=$out OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export LD_LIBRARY_PATH=$out${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} PATH=$venv/bin:$PATH
export PYTHONPATH=$here/hook:$here${PYTHONPATH:+:$PYTHONPATH}
# Every law is a process that imports torch and transformers: 31 s of a processor, 12 from compiled files, which uv does not
# make. The first process keeps them, whatever its surroundings say.
unset PYTHONDONTWRITEBYTECODE
LD_PRELOAD=$out/libnullcuda.so exec "$@"

# Decides whether CUDA is built: finds a toolkit that can build it, or the one reason why there is none.
#
# Included, not a subdirectory: a language must be enabled where its objects are linked. Gives
#   SHARPI_CUDA_BUILT   whether CUDA is built
#   SHARPI_CUDA_STATE   in words, what is built or why not
#   CMAKE_CUDA_ARCHITECTURES, and the target CUDA::cudart_static, where it is built
cmake_policy(VERSION 3.18)  # as the project's: a script that includes this alone has none, and then no IN_LIST
set(SHARPI_CUDA_OLDEST 12.0)
set(SHARPI_CUDA_BUILT FALSE)

# Sets CUDACXX and CUDAToolkit_ROOT to a toolkit that can build CUDA, or `reason` to why there is none.
macro(sharpi_find_toolkit reason)
  set(${reason} "")
  # CMake looks in these by itself, except for the folder that NVIDIA's installer uses and does not put on the path.
  find_program(SHARPI_NVCC NAMES ${CMAKE_CUDA_COMPILER} $ENV{CUDACXX} nvcc
               HINTS $ENV{CUDA_HOME}/bin $ENV{CUDA_PATH}/bin PATHS /usr/local/cuda/bin DOC "The CUDA compiler")
  if(NOT SHARPI_NVCC)
    set(${reason} "no nvcc was found; set CUDACXX to it if there is one")
  else()
    get_filename_component(sharpi_nvcc_file "${SHARPI_NVCC}" REALPATH)
    get_filename_component(sharpi_nvcc_folder "${sharpi_nvcc_file}" DIRECTORY)
    get_filename_component(CUDAToolkit_ROOT "${sharpi_nvcc_folder}" DIRECTORY)
    execute_process(COMMAND "${SHARPI_NVCC}" --version OUTPUT_VARIABLE sharpi_nvcc_says ERROR_QUIET)
    if(NOT sharpi_nvcc_says MATCHES "release ([0-9]+\\.[0-9]+)")
      set(${reason} "${SHARPI_NVCC} does not say its version")
    elseif(CMAKE_MATCH_1 VERSION_LESS SHARPI_CUDA_OLDEST)
      set(${reason} "${SHARPI_NVCC} is CUDA ${CMAKE_MATCH_1}, and ${SHARPI_CUDA_OLDEST} is needed")
    else()
      set(SHARPI_CUDA_VERSION ${CMAKE_MATCH_1})
      # Checked before CMake tries the compiler, which links a program and reports a missing runtime at length.
      find_package(CUDAToolkit QUIET)
      find_path(SHARPI_CUDA_HEADERS cuda_runtime.h PATHS ${CUDAToolkit_INCLUDE_DIRS} NO_DEFAULT_PATH)
      if(NOT TARGET CUDA::cudart_static)
        set(${reason} "the toolkit of ${SHARPI_NVCC} has no static runtime library (libcudart_static)")
      elseif(NOT SHARPI_CUDA_HEADERS)
        set(${reason} "the toolkit of ${SHARPI_NVCC} has no headers (cuda_runtime.h)")
      else()
        if(NOT CMAKE_CUDA_COMPILER)
          unset(CMAKE_CUDA_COMPILER CACHE)  # else an earlier failure would stand
        endif()
        set(ENV{CUDACXX} "${SHARPI_NVCC}")
        check_language(CUDA)
        if(NOT CMAKE_CUDA_COMPILER)
          set(${reason} "${SHARPI_NVCC} compiles nothing here; CUDAHOSTCXX may name a C++ compiler that it knows")
        endif()
      endif()
    endif()
  endif()
endmacro()

# Compute capabilities of the GPUs that this machine shows, as "90;120", without those that are too old for Sharpi.
function(sharpi_visible_capabilities result)
  set(found "")
  find_program(SHARPI_NVIDIA_SMI nvidia-smi)
  if(SHARPI_NVIDIA_SMI)
    execute_process(COMMAND "${SHARPI_NVIDIA_SMI}" --query-gpu=compute_cap --format=csv,noheader
                    OUTPUT_VARIABLE text ERROR_QUIET RESULT_VARIABLE failed TIMEOUT 30)
    if(NOT failed)
      string(REGEX MATCHALL "[0-9]+\\.[0-9]" capabilities "${text}")
      foreach(capability IN LISTS capabilities)
        if(capability VERSION_GREATER_EQUAL 7.5)
          string(REPLACE "." "" number ${capability})
          list(APPEND found ${number})
        endif()
      endforeach()
      list(REMOVE_DUPLICATES found)
    endif()
  endif()
  set(${result} "${found}" PARENT_SCOPE)
endfunction()

# What to compile for by default. With GPUs here: machine code for them and nothing else. Without: PTX,
# which the driver of whatever machine it reaches compiles at first use and then keeps. PTX of a generation runs on
# all later ones: three of them serve everything from 7.5 to 12.x in little space, with the newer instructions of
# tensor cores and copies if the GPU has them.
function(sharpi_choose_architectures result)
  sharpi_visible_capabilities(visible)
  execute_process(COMMAND "${SHARPI_NVCC}" --list-gpu-arch OUTPUT_VARIABLE text ERROR_QUIET)
  string(REGEX MATCHALL "[0-9]+" known "${text}")
  set(chosen "")
  foreach(capability IN LISTS visible)
    if(capability IN_LIST known)
      list(APPEND chosen ${capability}-real)
    else()
      set(chosen "")  # newer than the toolkit: PTX reaches it
      break()
    endif()
  endforeach()
  if(NOT chosen)
    set(chosen 75-virtual 80-virtual 90-virtual)
  endif()
  set(${result} "${chosen}" PARENT_SCOPE)
endfunction()

if(SHARPI_CUDA STREQUAL "OFF")
  set(SHARPI_CUDA_STATE "not built: SHARPI_CUDA=OFF")
elseif(SHARPI_CUDA STREQUAL "AUTO" OR SHARPI_CUDA STREQUAL "ON")
  include(CheckLanguage)
  sharpi_find_toolkit(sharpi_cuda_obstacle)
  if(NOT sharpi_cuda_obstacle)
    set(SHARPI_CUDA_ARCHITECTURES "" CACHE STRING
        "Compute capabilities, as CMAKE_CUDA_ARCHITECTURES takes them; empty: this machine's GPUs, else PTX for all")
    if(SHARPI_CUDA_EMULATOR)
      set(CMAKE_CUDA_ARCHITECTURES 90-virtual)
      set(CMAKE_CUDA_RUNTIME_LIBRARY None)
    elseif(SHARPI_CUDA_ARCHITECTURES)
      # The "a" of 90a is for the few sources that use it (cuda/CMakeLists.txt), and unknown to older CMakes.
      string(REGEX REPLACE "([0-9])[af]" "\\1" CMAKE_CUDA_ARCHITECTURES "${SHARPI_CUDA_ARCHITECTURES}")
    else()
      sharpi_choose_architectures(CMAKE_CUDA_ARCHITECTURES)
    endif()
    enable_language(CUDA)
    set(SHARPI_CUDA_BUILT TRUE)
    string(REPLACE ";" ", " architectures "${CMAKE_CUDA_ARCHITECTURES}")
    set(SHARPI_CUDA_STATE "CUDA ${SHARPI_CUDA_VERSION} for ${architectures}")
  elseif(SHARPI_CUDA STREQUAL "ON")
    message(FATAL_ERROR "SHARPI_CUDA=ON: ${sharpi_cuda_obstacle}")
  else()
    set(SHARPI_CUDA_STATE "not built: ${sharpi_cuda_obstacle}")
  endif()
else()
  message(FATAL_ERROR "SHARPI_CUDA must be AUTO, ON or OFF, not '${SHARPI_CUDA}'")
endif()

// The headers that src/bindings.rs is generated from: the include folder of a tensorflow wheel holds them
// (tensorflow/include). To regenerate, with bindgen 0.73 (`cargo install bindgen-cli`, needs libclang):
//   crates/pjrt-sys/headers/generate.sh <folder that contains xla/pjrt/c>
#include "xla/pjrt/c/pjrt_c_api.h"
#include "xla/pjrt/c/pjrt_c_api_ffi_extension.h"
#include "xla/pjrt/c/pjrt_c_api_layouts_extension.h"
#include "xla/pjrt/c/pjrt_c_api_memory_descriptions_extension.h"
#include "xla/pjrt/c/pjrt_c_api_phase_compile_extension.h"
#include "xla/pjrt/c/pjrt_c_api_profiler_extension.h"
#include "xla/pjrt/c/pjrt_c_api_stream_extension.h"
#include "xla/pjrt/c/pjrt_c_api_tpu_topology_extension.h"
#include "xla/ffi/api/c_api.h"

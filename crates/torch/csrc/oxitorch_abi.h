// The flat C boundary between the PyTorch shim (C++) and the core (Rust).
//
// Two tables of function pointers cross once, at start: the core's (OxiCore) goes to the shim, the shim's (OxiShim)
// comes back. Nothing else is linked, so one core serves every torch version and a shim can be built at first import.
// No exception and no panic crosses a call. Mirrored by hand in src/abi.rs, which checks sizes at compile time.
#pragma once
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Raised whenever a struct or a signature below changes.
#define OXI_ABI_VERSION 19

// What an argument holds. Values are stable: the core encodes them into keys.
enum {
  OXI_NONE = 0,
  OXI_TENSOR = 1,
  OXI_TENSORS = 2,   // Tensor[] or Tensor?[]; absent entries carry OXI_UNDEFINED
  OXI_INT = 3,       // also ScalarType, Layout, MemoryFormat and Device index
  OXI_DOUBLE = 4,
  OXI_BOOL = 5,
  OXI_COMPLEX = 6,   // doubles[0], doubles[1]
  OXI_INTS = 7,
  OXI_DOUBLES = 8,
  OXI_BOOLS = 9,     // ints[k] is 0 or 1
  OXI_STR = 10,      // len bytes, not terminated
  OXI_GENERATOR = 11,// pointer for OxiShim::rng_advance; null means the device's default generator
  OXI_DEVICE = 12,   // device index in i
  OXI_SCALARS = 13,  // Scalar[]: a nested OxiArg array
  OXI_OTHER = 14     // storage, dimname, ...: the core answers OXI_FALLBACK
};

// OxiTensor::flags
enum { OXI_WRAPPED_NUMBER = 1, OXI_UNDEFINED = 2, OXI_CONTIGUOUS = 4, OXI_CONJ = 8, OXI_NEG = 16 };
// OxiTensor::device_type
enum { OXI_DEVICE_CPU = 0, OXI_DEVICE_SELF = 1, OXI_DEVICE_OTHER = 2 };

typedef struct OxiTensor {  // borrowed: valid during the call
  void* slot;               // the core's Slot of the storage; null for a tensor of another device
  const void* host;         // data pointer of a CPU tensor
  const int64_t* sizes;
  const int64_t* strides;   // in elements
  int64_t offset;           // storage offset in elements
  int32_t ndim;
  int16_t dtype;            // c10::ScalarType
  uint8_t device_type;
  uint8_t flags;
  int32_t device_index;
  int32_t reserved;
} OxiTensor;

typedef struct OxiArg {
  uint32_t tag;
  uint32_t len;
  union {
    int64_t i;
    double d;
    const OxiTensor* t;
    const int64_t* ints;
    const double* doubles;
    const char* s;
    const struct OxiArg* args;
    void* p;
  } u;
} OxiArg;

// What a result is.
enum {
  OXI_OUT_NEW = 0,       // a new tensor over `slot`, which the shim now owns
  OXI_OUT_ARG = 1,       // argument `arg` itself (in-place, out=)
  OXI_OUT_ARG_ITEM = 2,  // entry `item` of the tensor list argument `arg`
  OXI_OUT_RESIZED = 3,   // argument `arg`, first resized (with torch's warning) to `sizes`; then written by OxiCore::copy
  OXI_OUT_UNDEFINED = 4, // an undefined tensor (output_mask off)
  OXI_OUT_LIST = 5,      // a list whose `arg` entries follow
  OXI_OUT_VIEW_ARG = 6,  // a view of the storage of tensor `arg` among the arguments of a graph
  OXI_OUT_VIEW_OUT = 7   // a view of the storage of result `arg`, which came before
};

typedef struct OxiOut {
  int32_t kind;
  int32_t arg;
  int32_t item;
  int16_t dtype;
  uint8_t contiguous;      // whether the strides are row-major
  uint8_t reserved;
  int32_t ndim;
  int32_t device_index;
  void* slot;
  const int64_t* sizes;    // owned by the core until the next dispatch of this thread
  const int64_t* strides;
  int64_t nbytes;          // of the new storage
  int64_t offset;          // in elements; 0 for results of ops
} OxiOut;

enum { OXI_OK = 0, OXI_FALLBACK = 1, OXI_ERROR = 2, OXI_PENDING = 3 };
// What came of a function that is to be one program.
enum { OXI_TRACED_REFUSED = 16, OXI_TRACED_FUNCTION = 17, OXI_TRACED_KEPT = 18 };
enum {  // exception class to throw
  OXI_ERR_RUNTIME = 0, OXI_ERR_INDEX = 1, OXI_ERR_TYPE = 2, OXI_ERR_VALUE = 3,
  OXI_ERR_NOT_IMPLEMENTED = 4, OXI_ERR_OUT_OF_MEMORY = 5, OXI_ERR_INTERRUPTED = 6, OXI_ERR_LINALG = 7
};

typedef struct OxiError {
  int32_t kind;
  const char* message;     // NUL-terminated, owned by the core until this thread's next call
} OxiError;

typedef struct OxiResult {
  const OxiOut* outs;
  uint32_t nouts;
  OxiError error;
  OxiOut only;  // what `outs` points at if there is one result
} OxiResult;

// What a span is: on the host, but for the last, which is on the device.
enum { OXI_SPAN_LAUNCH = 0, OXI_SPAN_COMPILE = 1, OXI_SPAN_WAIT = 2, OXI_SPAN_COPY = 3, OXI_SPAN_PROGRAM = 4 };

typedef struct OxiSpan {   // something that took time; texts live during the call that passes it
  int32_t kind;
  int32_t device;
  int64_t start_ns;        // since 1970
  int64_t end_ns;
  int64_t thread;          // the operating system's number
  uint64_t window;         // equal for a launch and its program, else 0
  uint64_t launched_in;    // of those, what OxiShim::profiled said at the launch, else 0
  int64_t bytes;           // of a copy, else -1
  const char* name;
  const char* line;        // the Python line, or empty
} OxiSpan;

// What this process does in a collective of several: a function on memory of tensors.
typedef struct OxiTask {
  void* context;           // what OxiShim::task_run and task_drop take
  const char* name;        // "all_reduce"; stays for ever
  const void* group;       // what OxiCore::group gave
  uint64_t lane;           // tasks of one lane are done in their order and numbered in it, others at once
} OxiTask;

// A collective as a program of one device of each process. Values are stable; as in the core's enums.
enum {
  OXI_ALL_REDUCE = 0,
  OXI_ALL_GATHER = 1,
  OXI_REDUCE_SCATTER = 2,
  OXI_ALL_TO_ALL = 3,
  OXI_BROADCAST = 4
};
enum { OXI_SUM = 0, OXI_PRODUCT = 1, OXI_MIN = 2, OXI_MAX = 3, OXI_AND = 4, OXI_OR = 5, OXI_XOR = 6 };
typedef struct OxiCollective {
  int32_t kind;
  int32_t reduction;       // of OXI_ALL_REDUCE and OXI_REDUCE_SCATTER
  int32_t root;            // of OXI_BROADCAST: the place among the devices
  uint32_t ndevices;
  const int32_t* devices;  // ids of the members' devices
} OxiCollective;

typedef struct OxiMemory { // row-major bytes of a tensor
  void* bytes;
  size_t len;
} OxiMemory;

// ---- implemented by the core; every function may be called from any thread, without the GIL ----
typedef struct OxiCore {
  uint32_t abi_version;
  // By what the core serves this overload, for good; or null. `composite`: it has a CompositeImplicitAutograd kernel.
  const void* (*bind)(const char* schema, int32_t composite);
  // What to warn of where this overload's first argument, which it writes to, has elements that share memory; or null.
  const char* (*warns_of_expanded)(const void* op);
  // Whether the core has a row under this base name ("add"): spares printing the other schemas.
  int32_t (*knows)(const char* base_name);
  // Who serves this overload ("add.out") of ops on sparse tensors: 0 whoever serves it otherwise, 1 PyTorch's CPU kernel,
  // 2 Python. `layout`: 0 strided, 1 COO, 2 compressed.
  int32_t (*sparse)(int32_t layout, const char* overload);
  int32_t (*dispatch)(const void* op, int32_t device, const OxiArg* args, uint32_t nargs, OxiResult* result);
  // Counts an op that goes to the CPU. OXI_ERROR under OXITORCH_FALLBACK=error. `warn` receives a message the first time.
  int32_t (*fallback)(const char* op_name, const char** warn, OxiError* error);
  // Storages. `alloc` fails (null, error set) when the device has no room.
  void* (*alloc)(size_t nbytes, int32_t device, OxiError* error);
  void (*drop_slot)(void* slot);
  uintptr_t (*address)(void* slot);                            // the storage's unique fake address
  void* (*find)(uintptr_t address, int64_t* offset_bytes);    // the inverse, also for addresses inside a storage
  void* (*resized)(void* slot, size_t nbytes, OxiError* error);  // a new slot with the old bytes, cut or zero-padded
  // Copies. Host memory is contiguous in `dst`/`src`'s logical order.
  // `kept_as`: the dtype whose place the bytes of a dtype have in these, or -1 if the device does not keep it.
  int32_t (*kept_as)(int32_t dtype, size_t itemsize);
  int32_t (*write)(const OxiTensor* dst, const void* host, OxiError* error);
  int32_t (*read)(const OxiTensor* src, void* host, OxiError* error);
  int32_t (*copy)(const OxiTensor* src, const OxiTensor* dst, OxiError* error);  // converts dtypes and devices
  // Gives `dst`, which is new and whole, the elements of `src` and `fill`, an element, behind them; OXI_FALLBACK where that
  // would take a program.
  int32_t (*pad)(const OxiTensor* src, const OxiTensor* dst, const void* fill, OxiError* error);
  // Devices and streams.
  int32_t (*device_count)(void);  // starts no device that the kernel shows
  int32_t (*check_device)(int32_t device, OxiError* error);  // whether there is one; starts none, too
  int32_t (*synchronize)(int32_t device, OxiError* error);
  int32_t (*is_idle)(int32_t device);
  uint64_t (*event_record)(int32_t device);
  // The same without launching what was recorded: within a program, by its share of the ops; `of_collectives`: when those
  // so far are done.
  uint64_t (*event_note)(int32_t device, uint8_t of_collectives);
  int32_t (*event_query)(uint64_t event);
  int32_t (*event_wait)(uint64_t event, OxiError* error);
  double (*event_elapsed_ms)(uint64_t start, uint64_t end, OxiError* error);
  void (*event_drop)(uint64_t event);
  // Memory statistics in bytes: current, peak, allocated in all, freed in all; counts of buffers likewise.
  void (*memory)(int32_t device, int64_t out[8]);
  void (*memory_info)(int32_t device, size_t* free_bytes, size_t* total_bytes);
  void (*reset_peak)(int32_t device);
  void (*reset_accumulated)(int32_t device);
  // The Python class of the exception behind this thread's last OXI_ERR_INTERRUPTED.
  void* (*interrupted_by)(void);
  // Compiled graphs; `device` is that of the tensors. `watch` begins to note what this thread records and gives 0 where it
  // cannot; `watched` ends that and keeps the recipe, or gives 0 where there is none; `replay` records by a recipe of the
  // graph, or answers OXI_FALLBACK.
  int32_t (*watch)(int32_t device, const OxiTensor* args, uint32_t nargs, OxiError* error);
  int32_t (*watched)(int64_t graph, int32_t device, const OxiTensor* args, uint32_t nargs, const OxiTensor* outs,
                     uint32_t nouts, OxiError* error);
  int32_t (*replay)(int64_t graph, int32_t device, const OxiTensor* args, uint32_t nargs, OxiResult* result);
  // Functions that are one program each: as `watch`; one more tensor that the function takes; as `watched`, where tensors behind
  // the arguments are made by the function and written in each call, and the caller gives some of them away; `dry`: the arguments get back
  // what they held. Gives OXI_TRACED_FUNCTION, and later a `replay` is one
  // program; or `error` says what it depends on besides (OXI_TRACED_REFUSED), or which lines made tensors that outlive it
  // (OXI_TRACED_KEPT). `untrace` undoes what was recorded.
  int32_t (*trace)(int32_t device, const OxiTensor* args, uint32_t nargs, int32_t dry, OxiError* error);
  int32_t (*trace_also)(int32_t device, const OxiTensor* tensor, OxiError* error);
  int32_t (*traced)(int64_t graph, int32_t device, const OxiTensor* args, uint32_t nargs, const OxiTensor* outs,
                    uint32_t nouts, uint8_t ends_step, uint8_t dry, const uint32_t* donated, uint32_t ndonated,
                    OxiError* error);
  int32_t (*untrace)(int32_t device, const OxiTensor* args, uint32_t nargs, OxiError* error);
  // From here on (`on` is 1), until it is 0, what is recorded is no part of the function.
  int32_t (*trace_pause)(int32_t device, uint8_t on, OxiError* error);
  // Loops and branches. `body_begin`: this thread begins to record the body of one, which is given tensors like these, or
  // OXI_FALLBACK; `body_end`: the body gives these; `body_drop`: it is dropped, or, if it is not `open`, the one that was
  // recorded last. Where it is no body, `error` says why, and `body_end` answers OXI_FALLBACK. `control` records what is done
  // with the bodies that were recorded last: `name` is "cond", "while_loop", "scan" or "map", `numbers` its length, whether it is reversed, how many
  // of the operands are carried, and how many at the end are states of generators, which come behind the results of a
  // scan; or OXI_FALLBACK, and the result's error says why.
  int32_t (*body_begin)(int32_t device, const OxiTensor* like, uint32_t n, OxiResult* result);
  int32_t (*body_end)(int32_t device, const OxiTensor* gives, uint32_t n, OxiError* error);
  void (*body_drop)(int32_t device, uint8_t open, OxiError* error);
  int32_t (*control)(int32_t device, const char* name, const int64_t numbers[4], const OxiTensor* operands, uint32_t n,
                     OxiResult* result);
  // An op without a row that may have a decomposition in Python ("aten::diff"): what `decomposed` takes for it, for good, or
  // null where no recipe could record it, as it writes.
  const void* (*decomposable)(const char* name, const char* schema);
  // Records a call by the recipe of its decomposition, or answers OXI_FALLBACK and says in `graph` what number a recipe for
  // such a call is to have: 0, none is kept; -1, no decomposition takes it.
  int32_t (*decomposed)(const void* op, int32_t device, const OxiArg* args, uint32_t nargs, int64_t* graph,
                        OxiResult* result);
  // A process group, as tasks name it, with its ranks in its order; `group_drop` lets it go, which tasks may outlive.
  void* (*group)(const char* name, const uint64_t* ranks, uint32_t nranks);
  void (*group_drop)(void* group);
  // The number of its last task of a lane; the first is 1.
  uint64_t (*group_number)(const void* group, uint64_t lane);
  // Records a task that reads and writes tensors, row-major; if `in_place` is not 0, those that it writes hold the old value.
  // Gives what `task_outcome` takes and `task_drop` lets go, or null. The context is the core's from then on in any case.
  void* (*task)(const OxiTask* task, int32_t device, const OxiTensor* reads, uint32_t nreads, const OxiTensor* writes,
                uint32_t nwrites, uint8_t in_place, OxiError* error);
  // Whether a collective of these devices is a program of theirs; else it is a task.
  int32_t (*are_programs)(const int32_t* devices, uint32_t ndevices);
  // Records a collective as a program; `task` compares, without tensors, what the ranks are about to do. As `task`.
  void* (*collective)(const OxiTask* task, const OxiCollective* what, const OxiTensor* in, const OxiTensor* out, OxiError* error);
  // OXI_OK when it is done, OXI_PENDING when it is not after so many milliseconds (0: it waits for nothing; -1: as long as
  // it takes).
  int32_t (*task_outcome)(const void* work, int32_t device, int64_t wait_ms, OxiError* error);
  uint64_t (*task_number)(const void* work);
  void (*task_drop)(void* work);
  // Profiling, for Kineto. `profile_start` gives a number, also while the device is not started; `profile_stop` calls
  // `visit` for each thing that happened since.
  uint64_t (*profile_start)(void);
  void (*profile_stop)(uint64_t number, void (*visit)(void* context, const OxiSpan* span), void* context);
} OxiCore;

// ---- implemented by the shim ----
// A thread, by PyTorch's count of threads, and the backward that runs in it (-1: none). `forward`: the thread that made the
// running node; 0: there is none, or it accumulates into a leaf, which belongs to no thread.
typedef struct OxiCaller {
  uint64_t thread;
  int64_t task;
  uint64_t forward;
  uint8_t grad;   // whether gradients of what it computes are wanted
  uint8_t keeps;  // whether the backward keeps its graph
} OxiCaller;

typedef struct OxiShim {
  uint32_t abi_version;
  // Reserves `blocks` Philox blocks of a generator (null: the device's default one).
  void (*rng_advance)(void* generator, int32_t device, uint64_t blocks, uint64_t* seed, uint64_t* offset);
  void (*rng_get)(int32_t device, uint64_t* seed, uint64_t* offset);
  void (*rng_set)(int32_t device, uint64_t seed, uint64_t offset);
  // The autograd node that this thread made last, and the one that runs in it (0: none). Autograd counts nodes in each
  // thread; these numbers are the process's: the thread above bit 40, below it one more than the count.
  uint64_t (*last_node)(void);
  uint64_t (*running_node)(void);
  void (*caller)(OxiCaller* caller);
  // Waits until autograd's thread of a device has let go of what it ran; called without the GIL, and not in a backward.
  void (*settle)(int32_t device);
  int32_t (*current_device)(void);
  void (*set_device)(int32_t device);
  // What a lowering depends on besides its arguments: the default dtype, and the precision of float32 products
  // (0 highest, 1 high, 2 medium). The second is slow to find out.
  int32_t (*default_dtype)(void);
  uint32_t (*float32_precision)(void);
  // Whether results must be the same in each run: `torch.use_deterministic_algorithms`.
  uint8_t (*deterministic)(void);
  // The number of the operation or range that runs in this thread, as PyTorch's profiler counts them; 0: none.
  uint64_t (*profiled)(void);
  const char* (*torch_version)(void);
  // Calls an ATen overload ("mm.out", without its namespace) on tensors in host memory, from any thread, and writes what
  // it returns into `results`: as its out= arguments where it has them. A result that is OXI_UNDEFINED is not wanted.
  // `alone`: in this thread only, as others make other parts of the call.
  int32_t (*call)(const char* op, const OxiArg* args, uint32_t nargs, const OxiTensor* results, uint32_t nresults,
                  uint8_t alone, OxiError* error);
  // Does a task, and waits until it is done; from any thread, once. `line` writes the Python line of `place`, which lives
  // during the call, as a text of less than `size` bytes. `declined`: why it cannot be done here, which only those are told
  // who wait for it; else null.
  int32_t (*task_run)(void* context, const char* declined, const OxiMemory* reads, uint32_t nreads, const OxiMemory* writes, uint32_t nwrites,
                      void (*line)(const void* place, char* text, size_t size), const void* place, OxiError* error);
  // The core has recorded a task, as that of this number of its lane.
  void (*task_begin)(void* context, uint64_t number);
  // The same task once more, which is not recorded yet, for a later call of the function that records it; null if it cannot
  // be done again. It is dropped as any other.
  void* (*task_again)(const void* context);
  void (*task_drop)(void* context);
  // Tensors that Python holds, by pointers to them; these three are called with the GIL. Describes them; 0: a
  // profiler has to see the call, or one of them is no plain tensor.
  uint8_t (*describe_held)(const void* const* tensors, uint32_t n, OxiTensor* described);
  uint8_t (*requires_grad)(const void* tensor);
  // Writes new references to Python's objects of the results of a graph. OXI_FALLBACK: Python has an exception.
  int32_t (*objects)(const OxiResult* result, const void* const* args, void** objects, OxiError* error);
} OxiShim;

// The shim's one export: registers everything with PyTorch. Returns null and sets `error` when it cannot.
typedef const OxiShim* (*OxiShimInit)(const OxiCore* core, const char** error);

#ifdef __cplusplus
}
#endif

//! Runs modules on the CPU plugin, and host tensors to feed them.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, LazyLock};

use oxitorch_hlo::{Builder, DType, Dims, Module, TensorType, Value};
use oxitorch_pjrt::{
    Client, ClientOptions, CompileOptions, DiscoverOptions, ElementType, ExecuteArgs, LoadOptions,
    OptionValue, Platform, Plugin, Program, discover,
};

/// The CPU plugin's library: `OXITORCH_CPU_PLUGIN`, or what `python3` would import.
fn cpu_plugin_path() -> PathBuf {
    if let Some(path) = std::env::var_os("OXITORCH_CPU_PLUGIN") {
        return path.into();
    }
    let print = "import sys; print('\\n'.join(p for p in sys.path if p))";
    let output = Command::new("python3").args(["-c", print]).output();
    let paths = output.map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default();
    let python_paths = paths.lines().map(PathBuf::from).collect();
    let found = discover(&DiscoverOptions { python_paths, override_paths: vec![] });
    found.into_iter().find(|f| f.platform == Platform::Cpu).map(|f| f.path).expect(
        "these tests run on the CPU plugin: `pip install xla-cpu-pjrt`, or set OXITORCH_CPU_PLUGIN to its xla_cpu_pjrt.so",
    )
}

static CLIENT: LazyLock<Arc<Client>> = LazyLock::new(|| {
    let plugin =
        Plugin::load(Platform::Cpu, &cpu_plugin_path(), &LoadOptions::for_platform(Platform::Cpu, false));
    Client::new(plugin.unwrap(), &ClientOptions { cpu_devices: Some(1), ..Default::default() }).unwrap()
});

/// A tensor on the host.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Host {
    pub(crate) ty: TensorType,
    pub(crate) bytes: Vec<u8>,
}

macro_rules! host_numbers {
    ($($make:ident $read:ident $T:ty, $dtype:ident;)*) => {
        $(pub(crate) fn $make(shape: &[i64], values: &[$T]) -> Host {
            let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            Host { ty: TensorType::new(DType::$dtype, shape), bytes }
        })*
        impl Host {
            $(pub(crate) fn $read(&self) -> Vec<$T> {
                assert_eq!(self.ty.dtype, DType::$dtype);
                let size = size_of::<$T>();
                self.bytes.chunks_exact(size).map(|c| <$T>::from_le_bytes(c.try_into().unwrap())).collect()
            })*
        }
    };
}

host_numbers! {
    f32s f32 f32, F32;
    f64s f64 f64, F64;
    s32s s32 i32, S32;
    s64s s64 i64, S64;
    s8s s8 i8, S8;
    u8s u8 u8, U8;
    u32s u32 u32, U32;
    u64s u64 u64, U64;
}

pub(crate) fn preds(shape: &[i64], values: &[bool]) -> Host {
    Host { ty: TensorType::new(DType::Pred, shape), bytes: values.iter().map(|&b| u8::from(b)).collect() }
}

/// Interleaved real and imaginary parts.
pub(crate) fn c64s(shape: &[i64], parts: &[f32]) -> Host {
    Host { ty: TensorType::new(DType::C64, shape), ..f32s(&[parts.len() as i64], parts) }
}

impl Host {
    pub(crate) fn pred(&self) -> Vec<bool> {
        assert_eq!(self.ty.dtype, DType::Pred);
        self.bytes.iter().map(|&b| b != 0).collect()
    }

    pub(crate) fn c64(&self) -> Vec<f32> {
        assert_eq!(self.ty.dtype, DType::C64);
        self.bytes.chunks_exact(4).map(|c| f32::from_le_bytes(c.try_into().unwrap())).collect()
    }
}

pub(crate) fn zeros(dtype: DType, shape: &[i64]) -> Host {
    let ty = TensorType::new(dtype, shape);
    let bytes = vec![0; ty.bytes() as usize];
    Host { ty, bytes }
}

/// Builds a module with a parameter per input type.
pub(crate) fn build(types: &[TensorType], body: impl FnOnce(&Builder, &[Value]) -> Vec<Value>) -> Module {
    let b = Builder::new();
    let params: Vec<Value> = types.iter().map(|t| b.param(t.clone())).collect();
    let outputs = body(&b, &params);
    let module = b.finish(&outputs).unwrap();
    module.verify().unwrap();
    module
}

/// Compiles and runs a module; the error is the plugin's message.
pub(crate) fn try_run(module: &Module, inputs: &[Host]) -> Result<Vec<Host>, String> {
    try_run_with(module, inputs, &CompileOptions::default())
}

/// Little effort in code generation: for tests of what is accepted.
pub(crate) fn quick() -> CompileOptions {
    let overrides = [
        ("xla_cpu_use_fusion_emitters", OptionValue::Bool(false)),
        ("xla_backend_optimization_level", OptionValue::Int(0)),
        ("xla_llvm_disable_expensive_passes", OptionValue::Bool(true)),
    ];
    let overrides = overrides.map(|(name, value)| (name.to_owned(), value)).to_vec();
    CompileOptions { overrides, ..CompileOptions::default() }
}

pub(crate) fn try_run_with(
    module: &Module,
    inputs: &[Host],
    options: &CompileOptions,
) -> Result<Vec<Host>, String> {
    let text = module.to_text();
    let client = &*CLIENT;
    let executable =
        client.compile(&Program::mlir(text.as_bytes()), options).map_err(|e| format!("{e}\n{text}"))?;
    let device = &client.devices()[0];
    let put = |h: &Host| client.buffer_from_host(&h.bytes, element(h.ty.dtype), &h.ty.shape, device).unwrap();
    let buffers: Vec<_> = inputs.iter().map(put).collect();
    let args: Vec<_> = buffers.iter().collect();
    let results = executable.execute(&args, &ExecuteArgs::default()).map_err(|e| format!("{e}\n{text}"))?;
    let types: Vec<_> = module.output_types().collect();
    assert_eq!(results.len(), types.len());
    let read = |(buffer, ty): (&oxitorch_pjrt::Buffer, &&TensorType)| {
        assert_eq!((buffer.dtype(), buffer.dims()), (element(ty.dtype), &ty.shape[..]), "{text}");
        let mut bytes = vec![0; ty.bytes() as usize];
        buffer.to_host(&mut bytes).unwrap();
        Host { ty: (*ty).clone(), bytes }
    };
    Ok(results.iter().zip(&types).map(read).collect())
}

/// Builds, verifies, compiles and runs.
pub(crate) fn run(inputs: &[Host], body: impl FnOnce(&Builder, &[Value]) -> Vec<Value>) -> Vec<Host> {
    let types: Vec<TensorType> = inputs.iter().map(|h| h.ty.clone()).collect();
    try_run(&build(&types, body), inputs).unwrap_or_else(|e| panic!("{e}"))
}

/// [`run`] with [`quick`] options.
pub(crate) fn run_quick(inputs: &[Host], body: impl FnOnce(&Builder, &[Value]) -> Vec<Value>) -> Vec<Host> {
    let types: Vec<TensorType> = inputs.iter().map(|h| h.ty.clone()).collect();
    try_run_with(&build(&types, body), inputs, &quick()).unwrap_or_else(|e| panic!("{e}"))
}

/// [`run`] for one result.
pub(crate) fn run1(inputs: &[Host], body: impl FnOnce(&Builder, &[Value]) -> Value) -> Host {
    run(inputs, |b, v| vec![body(b, v)]).remove(0)
}

fn element(dtype: DType) -> ElementType {
    match dtype {
        DType::Pred => ElementType::Pred,
        DType::S8 => ElementType::S8,
        DType::S16 => ElementType::S16,
        DType::S32 => ElementType::S32,
        DType::S64 => ElementType::S64,
        DType::U8 => ElementType::U8,
        DType::U16 => ElementType::U16,
        DType::U32 => ElementType::U32,
        DType::U64 => ElementType::U64,
        DType::F8E4M3FN => ElementType::F8E4M3FN,
        DType::F8E5M2 => ElementType::F8E5M2,
        DType::F16 => ElementType::F16,
        DType::BF16 => ElementType::Bf16,
        DType::F32 => ElementType::F32,
        DType::F64 => ElementType::F64,
        DType::C64 => ElementType::C64,
        DType::C128 => ElementType::C128,
    }
}

pub(crate) fn dims(d: &[i64]) -> Dims {
    Dims::from_slice(d)
}

/// Equal, or within `tolerance` relative to the larger of 1 and the wanted value.
#[track_caller]
pub(crate) fn assert_close(got: &[f32], want: &[f32], tolerance: f32) {
    assert_eq!(got.len(), want.len());
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let same = g == w || (g.is_nan() && w.is_nan()) || (g - w).abs() <= tolerance * w.abs().max(1.0);
        assert!(same, "element {i}: got {g}, want {w}\ngot  {got:?}\nwant {want:?}");
    }
}

//! What the tests on the CPU plugin share: finding it, starting a client, small programs.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use oxitorch_pjrt::{
    Buffer, BufferType, Client, ClientOptions, CompileOptions, DiscoverOptions, ElementType, Executable,
    LoadOptions, Platform, Plugin, Program, discover,
};

/// The CPU plugin's library: `OXITORCH_CPU_PLUGIN`, or what `python3` would import.
pub(crate) fn cpu_plugin_path() -> PathBuf {
    plugin_path(Platform::Cpu, "OXITORCH_CPU_PLUGIN").expect(
        "these tests run on the CPU plugin: `pip install xla-cpu-pjrt`, or set OXITORCH_CPU_PLUGIN to its xla_cpu_pjrt.so",
    )
}

pub(crate) fn plugin_path(platform: Platform, variable: &str) -> Option<PathBuf> {
    if let Some(path) = std::env::var_os(variable) {
        return Some(path.into());
    }
    let print = "import sys; print('\\n'.join(p for p in sys.path if p))";
    let output = Command::new("python3").args(["-c", print]).output();
    let paths = output.map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default();
    let python_paths = paths.lines().map(PathBuf::from).collect();
    let found = discover(&DiscoverOptions { python_paths, override_paths: vec![] });
    found.into_iter().find(|f| f.platform == platform).map(|f| f.path)
}

pub(crate) fn plugin() -> &'static Plugin {
    let options = LoadOptions::for_platform(Platform::Cpu, false);
    Plugin::load(Platform::Cpu, &cpu_plugin_path(), &options).unwrap()
}

pub(crate) fn client(devices: usize) -> Arc<Client> {
    Client::new(plugin(), &ClientOptions { cpu_devices: Some(devices), ..Default::default() }).unwrap()
}

pub(crate) fn f32s(dims: &[i64]) -> BufferType {
    BufferType::new(ElementType::F32, dims)
}

pub(crate) fn options(params: &[BufferType]) -> CompileOptions {
    CompileOptions { param_types: Some(params.to_vec()), ..Default::default() }
}

pub(crate) fn compile(client: &Arc<Client>, text: &str, params: &[BufferType]) -> Executable {
    client.compile(&Program::mlir(text.as_bytes()), &options(params)).unwrap()
}

pub(crate) const ADD: &str =
    "module { func.func @main(%a: tensor<4xf32>, %b: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.add %a, %b : tensor<4xf32>
  return %0 : tensor<4xf32> } }";

pub(crate) fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_ne_bytes()).collect()
}

pub(crate) fn put(client: &Arc<Client>, device: usize, values: &[f32], dims: &[i64]) -> Buffer {
    client.buffer_from_host(&bytes_of(values), ElementType::F32, dims, &client.devices()[device]).unwrap()
}

pub(crate) fn get(buffer: &Buffer) -> Vec<f32> {
    let mut bytes = vec![0; buffer.size_bytes()];
    buffer.to_host(&mut bytes).unwrap();
    bytes.chunks(4).map(|c| f32::from_ne_bytes(c.try_into().unwrap())).collect()
}

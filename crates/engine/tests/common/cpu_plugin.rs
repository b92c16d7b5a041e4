//! Clients of XLA's CPU plugin.

use std::path::PathBuf;
use std::sync::Arc;

use oxitorch_pjrt::{Client, ClientOptions, DiscoverOptions, LoadOptions, Platform, Plugin, discover};

/// The CPU plugin's library: `OXITORCH_CPU_PLUGIN`, or what `python3` would import.
pub(crate) fn cpu_plugin_path() -> PathBuf {
    let path = std::env::var_os("OXITORCH_CPU_PLUGIN").map(Into::into).or_else(|| {
        let print = "import sys; print('\\n'.join(p for p in sys.path if p))";
        let output = std::process::Command::new("python3").args(["-c", print]).output().ok()?;
        let paths = String::from_utf8_lossy(&output.stdout).lines().map(Into::into).collect();
        let found = discover(&DiscoverOptions { python_paths: paths, override_paths: vec![] });
        found.into_iter().find(|f| f.platform == Platform::Cpu).map(|f| f.path)
    });
    path.expect("these tests run on the CPU plugin: `pip install xla-cpu-pjrt`, or set OXITORCH_CPU_PLUGIN")
}

/// As many devices of the CPU plugin.
pub(crate) fn client(devices: usize) -> Arc<Client> {
    let load = LoadOptions::for_platform(Platform::Cpu, false);
    let plugin = Plugin::load(Platform::Cpu, &cpu_plugin_path(), &load).unwrap();
    Client::new(plugin, &ClientOptions { cpu_devices: Some(devices), ..Default::default() }).unwrap()
}

//! Safe owners of what PJRT plugins make: [`Plugin`], [`Client`], [`Device`], [`Buffer`], [`Executable`], [`Event`].
//!
//! ```no_run
//! use oxitorch_pjrt::{Client, ClientOptions, CompileOptions, ElementType, ExecuteArgs, LoadOptions, Platform, Plugin, Program};
//! # fn main() -> oxitorch_pjrt::Result<()> {
//! # let (path, text, input, mut output) = (std::path::Path::new(""), b"", [0u8; 16], [0u8; 16]);
//! let options = LoadOptions::for_platform(Platform::Cpu, false);
//! let client = Client::new(Plugin::load(Platform::Cpu, path, &options)?, &ClientOptions::default())?;
//! let program = client.compile(&Program::mlir(text), &CompileOptions::default())?;
//! let x = client.buffer_from_host(&input, ElementType::F32, &[4], &client.devices()[0])?;
//! let results = program.execute(&[&x], &ExecuteArgs::default())?;
//! results[0].to_host(&mut output)?;
//! # Ok(()) }
//! ```
//!
//! Every type is `Send + Sync`, destroys its C object when dropped, and keeps alive what it needs. What is known to make
//! a plugin abort the process is checked before the plugin is called.
//!
//! It does not know tensors, programs' meaning or PyTorch, and reads no configuration from the environment (it looks at
//! `XLA_FLAGS` because plugins do, and abort on what they do not know).

mod api;
mod blocks;
mod buffer;
mod bytes;
mod client;
mod client_options;
mod collectives;
mod compiled;
mod cores;
mod cost;
mod cuda_tools;
mod device;
mod discover;
mod element;
mod envelope;
mod error;
mod event;
mod executable;
mod flags;
mod guard;
mod heap;
mod hlo_text;
mod host_call;
mod host_threads;
#[cfg(all(target_os = "linux", target_env = "gnu", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod imports;
mod key_values;
mod loops;
mod named_value;
mod options;
mod platform;
mod plugin;
mod signals;
mod signature;
mod start;
mod topology;
mod upload;

pub use api::failed_destroys;
pub use blocks::release_blocks;
pub use buffer::{Buffer, ExternalReference};
pub use bytes::{Bytes, BytesMut};
pub use client::Client;
pub use client_options::ClientOptions;
pub use collectives::{Collective, CollectiveKind};
pub use compiled::{Compiled, CompiledMemoryStats, OptimizedProgram};
pub use cores::{THREADS, threads_of_one};
pub use cost::{Cost, Costs};
pub use cuda_tools::CudaTools;
pub use device::{Device, DeviceDescription, Memory, MemoryStats};
pub use discover::{
    DiscoverOptions, Found, Opened, choose, devices_present, discover, hardware_present, open,
};
pub use element::{BufferType, Dims, ElementType};
pub use error::{Code, Error, HostError, Result};
pub use event::Event;
pub use executable::{Executable, ExecuteArgs};
pub use heap::trim_heap;
pub use host_call::{HOST_CALL_NAME, HOST_CALL_TARGET, HostArg, HostCall, HostElement, HostResult};
pub use host_threads::HostThreads;
#[cfg(all(
    target_os = "linux",
    target_env = "gnu",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
pub use imports::replace as replace_import;
pub use key_values::{KeyValueStore, Processes, StoreError};
pub use named_value::{Attributes, NamedValue};
pub use options::{CompileOptions, Format, OptionValue, Program};
pub use oxitorch_proto::EffortLevel;
pub use platform::Platform;
pub use plugin::{Extension, LoadOptions, Plugin};
pub use start::{Patience, Start, StartError};
pub use topology::Topology;

/// Every owner may be used from any thread.
const _: () = {
    const fn send_and_sync<T: Send + Sync>() {}
    send_and_sync::<Plugin>();
    send_and_sync::<Client>();
    send_and_sync::<Device>();
    send_and_sync::<Buffer>();
    send_and_sync::<Executable>();
    send_and_sync::<Compiled>();
    send_and_sync::<Event>();
    send_and_sync::<Topology>();
    send_and_sync::<Error>();
};

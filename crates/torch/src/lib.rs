//! `oxitorch._core`: the extension module.
//!
//! * [`door`] is what the C++ shim calls, [`python`] what the Python package calls.
//! * [`library`] is what programs call to have torch's own kernels.
//! * [`accelerator`] leaves CUDA to scripts that train on it.
//! * [`sites`] finds the Python line of an op, [`storage`] gives storages their addresses.
//!
//! It knows no op and no StableHLO: it carries calls between PyTorch and the engine.

mod abi;
mod accelerator;
mod client;
mod door;
mod entries;
mod gil;
mod held;
mod library;
mod ops;
mod processes;
mod profile;
mod python;
mod setup;
mod sites;
mod state;
mod storage;
mod sums;
mod threads;
mod tree;

/// Objects of a launch are made in Python's thread and freed in the device's, which glibc's malloc is slow at.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

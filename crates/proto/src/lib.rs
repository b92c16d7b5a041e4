//! The protocol buffer messages that PJRT plugins read and write, written as prost types by hand: no protoc.
//!
//! `CompileOptionsProto` is the root; field numbers are those of `xla/pjrt/proto/compile_options.proto` and
//! `xla/xla_data.proto`. Fields that nothing here sets are left out: proto3 readers take them as their defaults.
//!
//! It does not know plugins: it only makes and reads bytes.

mod compile_options;
pub mod hlo;

pub use compile_options::{
    CompileOptionsProto, ComputationDevice, DeviceAssignmentProto, EffortLevel, ExecutableBuildOptionsProto,
    OptionOverrideProto, option_override,
};
pub use prost::Message;

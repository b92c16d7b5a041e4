//! StableHLO as an arena IR: a [`Builder`] that infers every result type, a verifier, and a printer.
//!
//! The main types are [`Builder`] (all methods take `&self`, so calls nest), [`Value`] (an index into it), [`TensorType`],
//! and [`Module`] (a finished function that prints itself). A type error does not stop the building: the first one is
//! kept, the op's result becomes a poison value of a plausible type, and [`Builder::finish`] returns the error.
//!
//! What this crate does not know: devices, plugins, PyTorch. It reads no environment, holds no global state, and the
//! printed text is a pure function of the ops.
//!
//! ```
//! use oxitorch_hlo::{Builder, DType, TensorType};
//!
//! let b = Builder::new();
//! let x = b.param(TensorType::new(DType::F32, vec![2, 3]));
//! let y = b.add(b.multiply(x, x), b.full_like(x, 1.0));
//! let sum = b.reduce_sum(y, &[1]);
//! let text = b.finish(&[sum])?.to_text();
//! assert!(text.contains("stablehlo.multiply %arg0, %arg0 : tensor<2x3xf32>"));
//! # Ok::<(), oxitorch_hlo::Error>(())
//! ```
#![forbid(unsafe_code)]

mod bounded;
mod builder;
mod donate;
mod error;
mod infer;
mod ir;
mod literal;
mod live;
mod print;
mod products;
mod reads;
mod sharding;
mod types;
mod verify;

pub use bounded::{Bounded, InMemory, Outline, Sampled, Unbounded};
pub use builder::{Builder, Lower, Strided};
pub use error::Error;
pub use ir::{
    ArgAttr, Axes, Binary, CompareKind, ConvDims, Convolution, CustomCall, Direction, DotDims, FftType,
    GatherDims, MemorySpace, Module, PLACEMENT_TARGET, Padding, Precision, RngAlgorithm, ScatterDims,
    ScatterFlags, Transpose, TriangularSolve, Unary, Value, Window,
};
pub use print::{Location, PrintOptions};
pub use products::Product;
pub use sharding::{Mesh, ReplicaGroups, Sharding};
pub use types::{DType, Dims, TensorType};

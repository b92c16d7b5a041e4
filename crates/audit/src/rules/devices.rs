//! Devices: what names a GPU or CUDA.

use crate::rule::{Family, joined};

mod around;
mod cuda;
mod kernels;

pub use cuda::MIRRORED;
pub(crate) use cuda::renamed;

const COUNT: usize = cuda::RULES.len() + kernels::RULES.len() + around::RULES.len();

pub(crate) static FAMILY: Family = Family {
    prefix: "DEV",
    name: "devices",
    about: "What names a GPU or CUDA: devices, `torch.cuda`, libraries of CUDA kernels, extensions.",
    rules: &joined::<COUNT>(&[cuda::RULES, kernels::RULES, around::RULES]),
};

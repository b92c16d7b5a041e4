//! What the command line tells XLA of GPUs.

use std::path::{Path, PathBuf};

use anyhow::Context;
use oxitorch_pjrt::{CudaTools, Found, NamedValue, OptionValue};

use crate::hardware::{gpus, named};

/// The packages to install for `ptxas` and `libdevice`, if nobody has them.
pub fn missing(plugin: Option<&Found>, site_dirs: &[PathBuf]) -> Option<&'static str> {
    if own_flags().contains(CudaTools::OPTION) || CudaTools::find(site_dirs).is_some() {
        return None;
    }
    let is_old = plugin.is_some_and(|p| p.path.to_string_lossy().contains("cuda12"));
    Some(if is_old { "nvidia-cuda-nvcc-cu12" } else { "nvidia-cuda-nvcc nvidia-nvvm" })
}

/// What the user tells XLA.
#[expect(clippy::disallowed_methods, reason = "the flags of the user stay")]
pub fn own_flags() -> String {
    std::env::var("XLA_FLAGS").unwrap_or_default()
}

/// XLA's flags for a child that compiles for GPUs: those that it would get otherwise, and where `ptxas` is. Whoever says
/// so himself is believed, and XLA looks in places of its own as well.
pub fn flags(own: &str, site_dirs: &[PathBuf], scratch: &Path) -> anyhow::Result<String> {
    let tools = match own.contains(CudaTools::OPTION) {
        true => None,
        false => CudaTools::find(site_dirs),
    };
    let Some(tools) = tools else { return Ok(own.to_owned()) };
    let folder = tools.folder(scratch).context("cannot link ptxas and libdevice")?;
    Ok(format!("{own} --{}={}", CudaTools::OPTION, folder.display()).trim_start().to_owned())
}

/// What the plugin is told of the devices of a topology, `h200:1x1x8`.
pub fn topology_options(topology: &str) -> anyhow::Result<Vec<(String, NamedValue)>> {
    let described = |(name, sides)| Some((gpus::target_config(named(name)?)?, sides));
    let (config, sides) = topology
        .split_once(':')
        .and_then(described)
        .with_context(|| format!("`{topology}` is no topology of GPUs"))?;
    let text = |text: &str| NamedValue::String(text.to_owned());
    Ok(vec![("target_config".into(), text(&config)), ("topology".into(), text(sides))])
}

/// Without a GPU nothing can be measured, and XLA would take odd tiles for products that it compiles itself; a run mostly
/// finds that cuBLAS is quicker.
pub fn overrides() -> Vec<(String, OptionValue)> {
    vec![
        ("xla_gpu_autotune_level".into(), OptionValue::Int(0)),
        ("xla_gpu_enable_triton_gemm".into(), OptionValue::Bool(false)),
    ]
}

/// What makes XLA compile in two thirds of the time, and leaves memory, fusions, FLOPs and bytes what they are (tried with a
/// step of GPT): another way to find tiles. Not every version of the plugin knows it.
pub(crate) const QUICKER: &str = "xla_gpu_experimental_enable_tiling_propagation";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_says_where_cuda_is_is_believed() {
        let own = "--xla_x=1 --xla_gpu_cuda_data_dir=/a";
        assert_eq!(flags(own, &[], Path::new("/")).unwrap(), own);
    }

    #[test]
    fn a_topology_is_the_gpu_and_how_many() {
        let options = topology_options("h200:1x1x8").unwrap();
        assert_eq!(options[1], ("topology".to_owned(), NamedValue::String("1x1x8".into())));
        assert!(options[0].1.to_string().contains("NVIDIA H200"));
        for wrong in ["h200", "v5e:1x1", "abacus:1x1x1"] {
            assert!(topology_options(wrong).is_err(), "{wrong}");
        }
    }
}

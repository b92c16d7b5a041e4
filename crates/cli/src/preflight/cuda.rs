//! What XLA needs besides its plugin to compile for a GPU: `ptxas`, which makes machine code, and `libdevice`, NVIDIA's
//! mathematical functions. pip packages bring them; PyTorch's triton does, too.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::Context;
use oxitorch_pjrt::{Found, OptionValue, Value};

use super::gpus;
use super::slices::Chip;

/// Where it looks for `ptxas` and `libdevice`.
const FLAG: &str = "--xla_gpu_cuda_data_dir=";

/// Where both are in a folder of CUDA's.
const PTXAS: &str = "bin/ptxas";
const LIBDEVICE: &str = "nvvm/libdevice/libdevice.10.bc";

/// Folders of CUDA in a site-packages folder.
const PACKAGED: [&str; 2] = ["nvidia/cu13", "nvidia/cuda_nvcc"];

/// Folders of CUDA on a machine.
const INSTALLED: [&str; 2] = ["/usr/local/cuda", "/opt/cuda"];

/// In triton's folder, the newest first.
const TRITON: &str = "triton/backends/nvidia";
const TRITON_PTXAS: [&str; 2] = ["bin/ptxas-blackwell", "bin/ptxas"];
const TRITON_LIBDEVICE: &str = "lib/libdevice.10.bc";

/// `ptxas` and `libdevice`, found.
#[derive(Clone, Debug, PartialEq)]
struct Tools {
    ptxas: PathBuf,
    libdevice: PathBuf,
}

impl Tools {
    /// Looks in the packages of these folders and where CUDA is installed.
    fn find(site_dirs: &[PathBuf]) -> Option<Tools> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let beside_path = std::env::split_paths(&path).filter_map(|bin| bin.parent().map(Path::to_owned));
        let installed: Vec<PathBuf> = INSTALLED.map(PathBuf::from).into_iter().chain(beside_path).collect();
        Tools::find_in(site_dirs, &installed)
    }

    fn find_in(site_dirs: &[PathBuf], installed: &[PathBuf]) -> Option<Tools> {
        let packaged = site_dirs.iter().flat_map(|dir| PACKAGED.map(|p| dir.join(p)));
        let roots: Vec<PathBuf> = packaged.chain(installed.iter().cloned()).collect();
        let triton: Vec<PathBuf> = site_dirs.iter().map(|dir| dir.join(TRITON)).collect();
        let in_roots = |file: &'static str| roots.iter().map(move |root| root.join(file));
        let triton_ptxas = triton.iter().flat_map(|t| TRITON_PTXAS.map(|p| t.join(p)));
        let triton_libdevice = triton.iter().map(|t| t.join(TRITON_LIBDEVICE));
        let exists = |file: &PathBuf| file.is_file();
        Some(Tools {
            ptxas: in_roots(PTXAS).chain(triton_ptxas).find(exists)?,
            libdevice: in_roots(LIBDEVICE).chain(triton_libdevice).find(exists)?,
        })
    }

    /// A folder that has both, as XLA expects them; made in `scratch` if they are not in one.
    fn folder(&self, scratch: &Path) -> std::io::Result<PathBuf> {
        let root = self.ptxas.ancestors().nth(2).unwrap_or(Path::new("/"));
        if self.ptxas.ends_with(PTXAS) && root.join(LIBDEVICE) == self.libdevice {
            return Ok(root.to_owned());
        }
        let folder = scratch.join("cuda");
        for (link, to) in [(PTXAS, &self.ptxas), (LIBDEVICE, &self.libdevice)] {
            let link = folder.join(link);
            fs::create_dir_all(link.parent().unwrap_or(&folder))?;
            match symlink(to, link) {
                Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => return Err(e),
                _ => {} // it is there from the program before
            }
        }
        Ok(folder)
    }
}

/// The packages to install for `ptxas` and `libdevice`, if nobody has them.
pub(crate) fn missing(plugin: Option<&Found>, site_dirs: &[PathBuf]) -> Option<&'static str> {
    if own_flags().contains(FLAG) || Tools::find(site_dirs).is_some() {
        return None;
    }
    let is_old = plugin.is_some_and(|p| p.path.to_string_lossy().contains("cuda12"));
    Some(if is_old { "nvidia-cuda-nvcc-cu12" } else { "nvidia-cuda-nvcc nvidia-nvvm" })
}

/// What the user tells XLA.
#[expect(clippy::disallowed_methods, reason = "the flags of the user stay")]
pub(crate) fn own_flags() -> String {
    std::env::var("XLA_FLAGS").unwrap_or_default()
}

/// XLA's flags for a child that compiles for GPUs: those that it would get otherwise, and where `ptxas` is. Whoever says
/// so himself is believed, and XLA looks in places of its own as well.
pub(crate) fn flags(own: &str, site_dirs: &[PathBuf], scratch: &Path) -> anyhow::Result<String> {
    let tools = match own.contains(FLAG) {
        true => None,
        false => Tools::find(site_dirs),
    };
    let Some(tools) = tools else { return Ok(own.to_owned()) };
    let folder = tools.folder(scratch).context("cannot link ptxas and libdevice")?;
    Ok(format!("{own} {FLAG}{}", folder.display()).trim_start().to_owned())
}

/// What the plugin is told of the devices of a topology, `h200:1x1x8`.
pub(crate) fn topology_options(topology: &str) -> anyhow::Result<Vec<(String, Value)>> {
    let described = |(name, sides)| Some((gpus::target_config(Chip::named(name)?)?, sides));
    let (config, sides) = topology
        .split_once(':')
        .and_then(described)
        .with_context(|| format!("`{topology}` is no topology of GPUs"))?;
    let text = |text: &str| Value::String(text.to_owned());
    Ok(vec![("target_config".into(), text(&config)), ("topology".into(), text(sides))])
}

/// Without a GPU nothing can be measured, and XLA would take odd tiles for products that it compiles itself; a run mostly
/// finds that cuBLAS is quicker.
pub(crate) fn overrides() -> Vec<(String, OptionValue)> {
    vec![
        ("xla_gpu_autotune_level".into(), OptionValue::Int(0)),
        ("xla_gpu_enable_triton_gemm".into(), OptionValue::Bool(false)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(folder: &Path, file: &str) -> PathBuf {
        let path = folder.join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, "").unwrap();
        path
    }

    #[test]
    fn tools_are_found_in_packages_on_the_machine_and_in_triton() {
        let place = tempfile::tempdir().unwrap();
        let (site, cuda) = (place.path().join("site"), place.path().join("cuda"));
        let find = || Tools::find_in(std::slice::from_ref(&site), std::slice::from_ref(&cuda));
        assert_eq!(find(), None);
        touch(&site, "triton/backends/nvidia/bin/ptxas");
        assert_eq!(find(), None);
        let libdevice = touch(&site, "triton/backends/nvidia/lib/libdevice.10.bc");
        let ptxas = touch(&site, "triton/backends/nvidia/bin/ptxas-blackwell");
        assert_eq!(find(), Some(Tools { ptxas, libdevice: libdevice.clone() }));

        // In two places: in links to both.
        let ptxas = touch(&site, "nvidia/cu13/bin/ptxas");
        let found = find().unwrap();
        assert_eq!(found, Tools { ptxas: ptxas.clone(), libdevice });
        for _ in 0..2 {
            let folder = found.folder(place.path()).unwrap();
            assert_eq!(fs::read_link(folder.join(PTXAS)).unwrap(), ptxas);
            assert!(folder.join(LIBDEVICE).is_file());
        }

        let libdevice = touch(&site, "nvidia/cu13/nvvm/libdevice/libdevice.10.bc");
        touch(&cuda, PTXAS);
        let found = find().unwrap();
        assert_eq!(found, Tools { ptxas, libdevice });
        assert_eq!(found.folder(place.path()).unwrap(), site.join("nvidia/cu13"));
    }

    #[test]
    fn who_says_where_cuda_is_is_believed() {
        let own = "--xla_x=1 --xla_gpu_cuda_data_dir=/a";
        assert_eq!(flags(own, &[], Path::new("/")).unwrap(), own);
    }

    #[test]
    fn a_topology_is_the_gpu_and_how_many() {
        let options = topology_options("h200:1x1x8").unwrap();
        assert_eq!(options[1], ("topology".to_owned(), Value::String("1x1x8".into())));
        assert!(options[0].1.to_string().contains("NVIDIA H200"));
        for wrong in ["h200", "v5e:1x1", "abacus:1x1x1"] {
            assert!(topology_options(wrong).is_err(), "{wrong}");
        }
    }
}

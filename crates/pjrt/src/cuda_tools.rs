//! What XLA needs besides its plugin to compile for a GPU: `ptxas`, which makes machine code, and `libdevice`, NVIDIA's
//! mathematical functions. pip packages bring them; PyTorch's triton does, too.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

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
pub struct CudaTools {
    ptxas: PathBuf,
    libdevice: PathBuf,
}

impl CudaTools {
    /// The compiler option that names the folder of both.
    pub const OPTION: &str = "xla_gpu_cuda_data_dir";

    /// Looks in the packages of these folders and where CUDA is installed.
    pub fn find(site_dirs: &[PathBuf]) -> Option<CudaTools> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let beside_path = std::env::split_paths(&path).filter_map(|bin| bin.parent().map(Path::to_owned));
        let installed: Vec<PathBuf> = INSTALLED.map(PathBuf::from).into_iter().chain(beside_path).collect();
        CudaTools::find_in(site_dirs, &installed)
    }

    fn find_in(site_dirs: &[PathBuf], installed: &[PathBuf]) -> Option<CudaTools> {
        let packaged = site_dirs.iter().flat_map(|dir| PACKAGED.map(|p| dir.join(p)));
        let roots: Vec<PathBuf> = packaged.chain(installed.iter().cloned()).collect();
        let triton: Vec<PathBuf> = site_dirs.iter().map(|dir| dir.join(TRITON)).collect();
        let in_roots = |file: &'static str| roots.iter().map(move |root| root.join(file));
        let triton_ptxas = triton.iter().flat_map(|t| TRITON_PTXAS.map(|p| t.join(p)));
        let triton_libdevice = triton.iter().map(|t| t.join(TRITON_LIBDEVICE));
        let exists = |file: &PathBuf| file.is_file();
        Some(CudaTools {
            ptxas: in_roots(PTXAS).chain(triton_ptxas).find(exists)?,
            libdevice: in_roots(LIBDEVICE).chain(triton_libdevice).find(exists)?,
        })
    }

    /// A folder that has both, as XLA expects them; made in `scratch` if they are not in one.
    pub fn folder(&self, scratch: &Path) -> std::io::Result<PathBuf> {
        let root = self.ptxas.ancestors().nth(2).unwrap_or(Path::new("/"));
        if self.ptxas.ends_with(PTXAS) && root.join(LIBDEVICE) == self.libdevice {
            return Ok(root.to_owned());
        }
        let folder = scratch.join("cuda");
        for (link, to) in [(PTXAS, &self.ptxas), (LIBDEVICE, &self.libdevice)] {
            let link = folder.join(link);
            fs::create_dir_all(link.parent().unwrap_or(&folder))?;
            if fs::read_link(&link).is_ok_and(|known| known == *to) {
                continue;
            }
            // Under a name of its own first: another process may do the same, or follow the old one.
            let new = link.with_extension(std::process::id().to_string());
            symlink(to, &new)?;
            fs::rename(new, link)?;
        }
        Ok(folder)
    }
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
        let find = || CudaTools::find_in(std::slice::from_ref(&site), std::slice::from_ref(&cuda));
        assert_eq!(find(), None);
        touch(&site, "triton/backends/nvidia/bin/ptxas");
        assert_eq!(find(), None);
        let libdevice = touch(&site, "triton/backends/nvidia/lib/libdevice.10.bc");
        let ptxas = touch(&site, "triton/backends/nvidia/bin/ptxas-blackwell");
        assert_eq!(find(), Some(CudaTools { ptxas, libdevice: libdevice.clone() }));

        // In two places: in links to both.
        let ptxas = touch(&site, "nvidia/cu13/bin/ptxas");
        let found = find().unwrap();
        assert_eq!(found, CudaTools { ptxas: ptxas.clone(), libdevice });
        for _ in 0..2 {
            let folder = found.folder(place.path()).unwrap();
            assert_eq!(fs::read_link(folder.join(PTXAS)).unwrap(), ptxas);
            assert!(folder.join(LIBDEVICE).is_file());
        }

        let libdevice = touch(&site, "nvidia/cu13/nvvm/libdevice/libdevice.10.bc");
        touch(&cuda, PTXAS);
        let found = find().unwrap();
        assert_eq!(found, CudaTools { ptxas, libdevice });
        assert_eq!(found.folder(place.path()).unwrap(), site.join("nvidia/cu13"));
    }
}

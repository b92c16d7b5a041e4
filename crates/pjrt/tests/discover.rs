//! Finding plugins in folders that look like Python's.

use std::path::PathBuf;

use oxitorch_pjrt::{DiscoverOptions, Platform, discover};

/// A folder with these files, removed when dropped.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str, files: &[&str]) -> Folder {
        let path = std::env::temp_dir().join(format!("oxitorch-discover-{}-{name}", std::process::id()));
        for file in files {
            let file = path.join(file);
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, "").unwrap();
        }
        Folder(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).unwrap();
    }
}

#[test]
fn plugins_are_found_with_their_versions() {
    let one = Folder::new(
        "one",
        &[
            "xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so",
            "xla_cpu_pjrt-0.0.1.dist-info/METADATA",
            "jax_plugins/xla_cuda12/xla_cuda_plugin.so",
            "jax_plugins/xla_cuda13/xla_cuda_plugin.so",
            "jax_cuda13_pjrt-0.12.0.dist-info/METADATA",
        ],
    );
    let two =
        Folder::new("two", &["libtpu/libtpu.so", "libtpu-0.0.51.dist-info/METADATA", "xla_cpu_pjrt.so"]);
    let own = two.0.join("xla_cpu_pjrt.so");
    let options = DiscoverOptions {
        python_paths: vec![one.0.clone(), two.0.clone(), "/no/such/folder".into()],
        override_paths: vec![(Platform::Cpu, own.clone())],
    };
    let found = discover(&options);
    let seen: Vec<_> =
        found.iter().map(|f| (f.platform, f.package.as_deref(), f.version.as_deref())).collect();
    assert_eq!(
        seen,
        [
            (Platform::Tpu, Some("libtpu"), Some("0.0.51")),
            (Platform::Cuda, Some("jax-cuda13-pjrt"), Some("0.12.0")),
            (Platform::Cuda, Some("jax-cuda12-pjrt"), None),
            (Platform::Cpu, None, None),
            (Platform::Cpu, Some("xla-cpu-pjrt"), Some("0.0.1")),
        ]
    );
    assert_eq!(found[3].path, own);
    assert_eq!(discover(&DiscoverOptions::default()), []);
}

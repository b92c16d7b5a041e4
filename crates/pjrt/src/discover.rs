//! Finding plugin libraries in Python's site-packages folders, and choosing the platform.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use crate::client::Client;
use crate::client_options::ClientOptions;
use crate::error::{Error, Result, err};
use crate::platform::Platform;
use crate::plugin::{LoadOptions, Plugin};

/// As users name it.
impl FromStr for Platform {
    type Err = Error;
    fn from_str(s: &str) -> Result<Platform, Error> {
        let named = Platform::ALL.into_iter().find(|p| p.name() == s);
        named.ok_or_else(|| err::invalid(format!("platform `{s}` is none of `tpu`, `cuda`, `cpu`")))
    }
}

/// Where to look.
#[derive(Clone, Debug, Default)]
pub struct DiscoverOptions {
    /// Folders that Python imports from (site-packages), in order.
    pub python_paths: Vec<PathBuf>,
    /// Libraries named by the user; they come before anything found.
    pub override_paths: Vec<(Platform, PathBuf)>,
}

/// A plugin library that is there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Found {
    /// What it drives.
    pub platform: Platform,
    /// The library.
    pub path: PathBuf,
    /// The Python package that brought it, if one did.
    pub package: Option<String>,
    /// The package's version.
    pub version: Option<String>,
}

/// Where packages keep their plugin, the preferred package of a platform first.
const PLACES: &[(Platform, &str, &str)] = &[
    (Platform::Tpu, "libtpu/libtpu.so", "libtpu"),
    (Platform::Cuda, "jax_plugins/xla_cuda13/xla_cuda_plugin.so", "jax-cuda13-pjrt"),
    (Platform::Cuda, "xla_plugins/xla_cuda13_pjrt/xla_cuda_plugin.so", "xla-cuda13-pjrt"),
    (Platform::Cuda, "xla_plugins/xla_cuda13/xla_cuda_plugin.so", "xla-cuda13-pjrt"),
    (Platform::Cuda, "jax_plugins/xla_cuda12/xla_cuda_plugin.so", "jax-cuda12-pjrt"),
    (Platform::Cuda, "xla_plugins/xla_cuda12_pjrt/xla_cuda_plugin.so", "xla-cuda12-pjrt"),
    (Platform::Cuda, "xla_plugins/xla_cuda12/xla_cuda_plugin.so", "xla-cuda12-pjrt"),
    (Platform::Cpu, "xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so", "xla-cpu-pjrt"),
];

/// Every plugin library found, the preferred one of each platform first. Nothing is loaded.
pub fn discover(options: &DiscoverOptions) -> Vec<Found> {
    let mut found: Vec<Found> = options
        .override_paths
        .iter()
        .map(|(platform, path)| Found {
            platform: *platform,
            path: path.clone(),
            package: None,
            version: None,
        })
        .collect();
    for (platform, place, package) in PLACES {
        for folder in &options.python_paths {
            let path = folder.join(place);
            if path.is_file() && !found.iter().any(|f| f.path == path) {
                let version = package_version(folder, package);
                found.push(Found { platform: *platform, path, package: Some((*package).into()), version });
            }
        }
    }
    found.sort_by_key(|f| f.platform); // stable: the order within a platform stays
    found
}

/// The version in the name of a package's `.dist-info` folder.
fn package_version(folder: &Path, package: &str) -> Option<String> {
    let wanted = normal(package);
    std::fs::read_dir(folder).ok()?.filter_map(|entry| entry.ok()).find_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        let (package, version) = name.strip_suffix(".dist-info")?.split_once('-')?;
        (normal(package) == wanted).then(|| version.to_string())
    })
}

fn normal(package: &str) -> String {
    package.to_ascii_lowercase().replace(['-', '.'], "_")
}

/// Whether the machine has hardware for a platform, by what the kernel shows; nothing is loaded.
pub fn hardware_present(platform: Platform) -> bool {
    match platform {
        Platform::Tpu => of_pci_vendor(GOOGLE) > 0 || Path::new("/dev/accel0").exists(),
        Platform::Cuda => {
            ["/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg"].iter().any(|p| Path::new(p).exists())
        }
        Platform::Cpu => true,
    }
}

/// How many chips or GPUs of a platform the kernel shows, if it does; nothing is loaded. What hides some of them from this
/// process (CUDA_VISIBLE_DEVICES, TPU_VISIBLE_CHIPS) is not looked at.
pub fn devices_present(platform: Platform) -> Option<usize> {
    let numbered = |name: &str| {
        let entries = std::fs::read_dir("/dev").ok()?;
        let is_one = |e: std::fs::DirEntry| {
            let file = e.file_name().to_string_lossy().into_owned();
            file.strip_prefix(name).is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
        };
        Some(entries.filter_map(Result::ok).filter_map(|e| is_one(e).then_some(())).count())
    };
    let found = match platform {
        Platform::Tpu => Some(of_pci_vendor(GOOGLE)).filter(|&n| n > 0).or_else(|| numbered("accel")),
        Platform::Cuda => numbered("nvidia"),
        Platform::Cpu => None,
    };
    found.filter(|&n| n > 0)
}

const GOOGLE: &str = "0x1ae0";

/// PCI devices of this vendor that are no network or storage devices. (Google's virtual machines have network and disk
/// devices of Google's own.)
fn of_pci_vendor(vendor: &str) -> usize {
    let Ok(devices) = std::fs::read_dir("/sys/bus/pci/devices") else { return 0 };
    let is_one = |d: &std::fs::DirEntry| {
        let read = |name: &str| std::fs::read_to_string(d.path().join(name)).unwrap_or_default();
        let class = read("class");
        read("vendor").trim() == vendor && !class.starts_with("0x01") && !class.starts_with("0x02")
    };
    devices.filter_map(Result::ok).filter(is_one).count()
}

/// The plugin to use: of the platform asked for, or else of the first platform, in the order TPU, CUDA, CPU, that has a
/// plugin and, according to `present`, hardware.
pub fn choose(
    found: &[Found],
    wanted: Option<Platform>,
    present: impl Fn(Platform) -> bool,
) -> Result<&Found> {
    let first = |platform| found.iter().find(|f| f.platform == platform);
    if let Some(platform) = wanted {
        return first(platform).ok_or_else(|| not_found(platform));
    }
    let usable = Platform::ALL.into_iter().filter(|&p| present(p)).find_map(first);
    usable.ok_or_else(|| not_found(Platform::Cpu))
}

/// A client on the platform that was chosen.
#[derive(Debug)]
pub struct Opened {
    /// The client.
    pub client: Arc<Client>,
    /// Where its plugin was found.
    pub found: Found,
    /// Platforms before it in the order that were not taken, with the reason.
    pub passed_over: Vec<(Platform, String)>,
}

/// Starts a client on the platform asked for, or else on the first of TPU, CUDA, CPU whose plugin is there and finds a
/// device. `options` gives each platform's. Plugins of platforms whose hardware is plainly absent are not loaded.
pub fn open(
    found: &[Found],
    wanted: Option<Platform>,
    options: impl Fn(Platform) -> ClientOptions,
) -> Result<Opened> {
    let mut passed_over = Vec::new();
    for platform in Platform::ALL {
        let last = platform == Platform::Cpu;
        match wanted {
            Some(wanted) if wanted != platform => continue,
            None if !hardware_present(platform) => {
                passed_over.push((platform, "this machine has no such hardware".into()));
                continue;
            }
            _ => {}
        }
        match start(found, platform, &options(platform)) {
            Ok((client, found)) => return Ok(Opened { client, found, passed_over }),
            Err(e) if wanted.is_some() || last => return Err(e),
            // What the user wrote is wrong; another platform would hide it.
            Err(e @ (Error::InvalidArgument { .. } | Error::Environment { .. })) => return Err(e),
            Err(e) => passed_over.push((platform, e.to_string())),
        }
    }
    Err(not_found(wanted.unwrap_or(Platform::Cpu)))
}

fn start(found: &[Found], platform: Platform, options: &ClientOptions) -> Result<(Arc<Client>, Found)> {
    let found = choose(found, Some(platform), |_| true)?;
    // Without the hardware libtpu would ask a metadata server for minutes.
    let load = LoadOptions::for_platform(platform, !hardware_present(platform));
    let plugin = Plugin::load(platform, &found.path, &load)?;
    Ok((Client::new(plugin, options)?, found.clone()))
}

fn not_found(platform: Platform) -> Error {
    Error::PluginNotFound { platform, hint: format!("`pip install {}`", platform.package()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(platform: Platform) -> Found {
        Found { platform, path: platform.name().into(), package: None, version: None }
    }

    #[test]
    fn platforms_are_tried_in_order() {
        let all = [found(Platform::Tpu), found(Platform::Cuda), found(Platform::Cpu)];
        let chosen = |present: &[Platform]| {
            let p = present.to_vec();
            choose(&all, None, move |x| p.contains(&x)).map(|f| f.platform)
        };
        assert_eq!(chosen(&Platform::ALL).unwrap(), Platform::Tpu);
        assert_eq!(chosen(&[Platform::Cuda, Platform::Cpu]).unwrap(), Platform::Cuda);
        assert_eq!(chosen(&[Platform::Cpu]).unwrap(), Platform::Cpu);
        assert!(chosen(&[]).is_err());
    }

    #[test]
    fn an_override_is_obeyed_or_refused() {
        let cpu = [found(Platform::Cpu)];
        assert_eq!(choose(&cpu, Some(Platform::Cpu), |_| false).unwrap().platform, Platform::Cpu);
        let error = choose(&cpu, Some(Platform::Tpu), |_| true).unwrap_err().to_string();
        assert!(error.contains("`tpu`") && error.contains("pip install libtpu"), "{error}");
        let error = choose(&[], None, |_| true).unwrap_err().to_string();
        assert!(error.contains("pip install xla-cpu-pjrt"), "{error}");
    }
}

//! The plugins that compile.

use anyhow::bail;
use oxitorch_pjrt::{Found, Platform};

use super::cuda;
use crate::Environment;

/// What compiles for a platform; an error says what to install.
pub(crate) fn plugin<'f>(
    found: &'f [Found],
    platform: Platform,
    environment: &Environment,
) -> anyhow::Result<&'f Found> {
    let plugin = found.iter().find(|f| f.platform == platform);
    let gpus = platform == Platform::Cuda;
    let tools = gpus.then(|| cuda::missing(plugin, &environment.site_dirs)).flatten();
    match (plugin, tools) {
        (Some(plugin), None) => Ok(plugin),
        (Some(_), Some(tools)) => {
            bail!(
                "ptxas and libdevice, with which XLA makes code for GPUs, are not installed: pip install {tools}"
            )
        }
        (None, tools) => {
            let (package, what) = (platform.package(), if gpus { "GPUs" } else { "a TPU" });
            let tools = tools.map_or(String::new(), |t| format!(" {t}"));
            bail!(
                "{package} is not installed, and it is what compiles for {what}: pip install {package}{tools}"
            )
        }
    }
}

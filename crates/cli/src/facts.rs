//! What the Python side knows and this side cannot: the interpreter, its import path, the table of variables.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};

/// Made by `oxitorch/_cli.py`.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Facts {
    /// The interpreter.
    pub(crate) executable: PathBuf,
    /// Its version, "3.11.7".
    pub(crate) python: String,
    /// The folder of its virtual environment, if it is in one.
    pub(crate) virtual_environment: Option<PathBuf>,
    /// The folder of the `oxitorch` package.
    pub(crate) package: PathBuf,
    /// The import path.
    pub(crate) site_dirs: Vec<PathBuf>,
    /// Where built shims are kept.
    pub(crate) cache_dir: PathBuf,
    pub(crate) disk_free_bytes: Option<u64>,
    /// Where the processes of torch.distributed keep their latest collectives, if they do.
    #[serde(default)]
    pub(crate) ranks: Option<PathBuf>,
    /// Settings of the cache of compiled programs.
    #[serde(default)]
    pub(crate) programs: Programs,
    pub(crate) torch: Option<Torch>,
    pub(crate) shim: Option<Shim>,
    /// The C++ compiler's command, or why there is none.
    pub(crate) compiler: Option<Vec<String>>,
    pub(crate) compiler_error: Option<String>,
    pub(crate) env: Vec<Variable>,
    pub(crate) env_foreign: Vec<Foreign>,
}

/// Settings of the cache of compiled programs.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct Programs {
    /// Whether programs are kept at all.
    pub(crate) on: bool,
    /// What they may have together; the default if none.
    pub(crate) bytes: Option<u64>,
    /// The folder or the URL that machines share.
    pub(crate) shared: Option<String>,
}

/// An installed torch.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Torch {
    pub(crate) version: String,
    pub(crate) root: PathBuf,
}

/// Where the shim for the installed torch is.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Shim {
    /// "override", "package", "cache", "missing" or "unknown".
    pub(crate) r#where: String,
    pub(crate) path: PathBuf,
    #[serde(default)]
    pub(crate) error: Option<String>,
}

/// A row of `oxitorch/_env.py`.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Variable {
    pub(crate) name: String,
    pub(crate) doc: String,
    pub(crate) values: String,
    pub(crate) default: String,
    pub(crate) since: String,
    /// What it is set to.
    pub(crate) value: Option<String>,
    /// Why that is not a value.
    pub(crate) error: Option<String>,
}

/// A variable that somebody else defined.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Foreign {
    pub(crate) name: String,
    pub(crate) doc: String,
    pub(crate) value: Option<String>,
}

impl Facts {
    /// Reads the JSON.
    pub(crate) fn parse(json: &str) -> anyhow::Result<Facts> {
        serde_json::from_str(json).context("the facts from the Python side cannot be read")
    }

    /// Asks an interpreter.
    pub(crate) fn ask(python: &Path) -> anyhow::Result<Facts> {
        let out = Command::new(python)
            .args(["-m", "oxitorch._cli"])
            .stdin(Stdio::null())
            .output()
            .with_context(|| format!("cannot run {}", python.display()))?;
        if !out.status.success() {
            let said = String::from_utf8_lossy(&out.stderr);
            let last = said.trim().lines().last().unwrap_or("nothing");
            bail!("oxitorch does not work in {}: it says `{last}`", python.display());
        }
        Facts::parse(std::str::from_utf8(&out.stdout)?)
    }

    /// Lets Python build the shim; the exit status.
    pub(crate) fn build_shim(&self, into: Option<&Path>) -> anyhow::Result<i32> {
        let mut command = Command::new(&self.executable);
        command.args(["-m", "oxitorch", "shim", "build"]);
        if let Some(folder) = into {
            command.arg("--into").arg(folder);
        }
        Ok(command.status()?.code().unwrap_or(1))
    }
}

//! Pages and bindings that a program writes. They are committed, and tests compare the pages with what they are made of.

use crate::{python, root, succeed};
use anyhow::{Context, Result, bail};
use std::path::Path;
use std::process::Command;

/// A page, by the name that the command takes, and the Python module that writes it.
struct Page {
    name: &'static str,
    module: &'static str,
    /// The file, if the module only prints the page.
    printed: Option<&'static str>,
}

const PAGES: &[Page] = &[
    Page { name: "environment", module: "oxitorch._env", printed: Some("docs/environment.md") },
    // Of the torch that is installed; each version has its page.
    Page { name: "ops", module: "tests.conformance.ops", printed: None },
    Page { name: "pytorch-tests", module: "tests.pytorch_tests.page", printed: None },
];

/// Writes the pages that are named, or all.
pub(crate) fn run(args: &[String]) -> Result<()> {
    let known = || PAGES.iter().map(|p| p.name).collect::<Vec<_>>().join(", ");
    if let Some(other) = args.iter().find(|a| PAGES.iter().all(|p| p.name != a.as_str())) {
        bail!("no generated page `{other}`; there are {}", known());
    }
    let root = root();
    for page in PAGES.iter().filter(|p| args.is_empty() || args.iter().any(|a| a == p.name)) {
        write(&root, page).with_context(|| format!("page `{}`", page.name))?;
    }
    Ok(())
}

fn write(root: &Path, page: &Page) -> Result<()> {
    let mut command = python(root, &["-m", page.module]);
    let Some(file) = page.printed else { return succeed(&mut command) };
    // The table of these sources, and not of what is installed.
    let output = command.env("PYTHONPATH", root.join("python")).output().context("cannot run Python")?;
    if !output.status.success() {
        bail!("{}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(std::fs::write(root.join(file), output.stdout)?)
}

/// Writes the bindings of PJRT from the headers in a folder.
pub(crate) fn bindings(args: &[String]) -> Result<()> {
    let [include] = args else {
        bail!(
            "usage: cargo xtask bindings INCLUDE\n\nINCLUDE has the headers of `xla/pjrt/c` and `xla/ffi/api`, as tensorflow's package has"
        );
    };
    if Command::new("bindgen").arg("--version").output().is_err() {
        bail!("bindgen is not installed\nhint: `cargo install bindgen-cli`, and libclang");
    }
    succeed(Command::new(root().join("crates/pjrt-sys/headers/generate.sh")).arg(include))
}

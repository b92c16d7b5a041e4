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

/// The pages of `oxitorch audit`'s rules, which this program writes itself.
const AUDIT: &str = "audit";

/// Writes the pages that are named, or all.
pub(crate) fn run(args: &[String]) -> Result<()> {
    let names: Vec<&str> = PAGES.iter().map(|p| p.name).chain([AUDIT]).collect();
    if let Some(other) = args.iter().find(|a| !names.contains(&a.as_str())) {
        bail!("no generated page `{other}`; there are {}", names.join(", "));
    }
    let root = root();
    if args.is_empty() || args.iter().any(|a| a == AUDIT) {
        audit(&root)?;
    }
    for page in PAGES.iter().filter(|p| args.is_empty() || args.iter().any(|a| a == p.name)) {
        write(&root, page).with_context(|| format!("page `{}`", page.name))?;
    }
    Ok(())
}

/// A page for each family of rules.
fn audit(root: &Path) -> Result<()> {
    let folder = root.join("docs/audit");
    std::fs::create_dir_all(&folder)?;
    for family in oxitorch_audit::families() {
        let file = folder.join(format!("{}.md", family.name.replace(' ', "-")));
        std::fs::write(file, oxitorch_audit::page(family))?;
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

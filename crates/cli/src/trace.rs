//! `oxitorch trace`: timelines of scripts.

use std::fs;
use std::path::{Path, PathBuf};

use anstyle::{AnsiColor, Style};
use anyhow::{Context, bail};
use clap::{Args, Subcommand};

use crate::facts::Facts;
use crate::merge::Merge;
use crate::script;
use oxitorch_format::bytes;

#[derive(Subcommand)]
pub(crate) enum Do {
    /// Run a script and write its timeline, which opens at https://ui.perfetto.dev
    ///
    /// The exit status is the script's. Ctrl-C ends the script, and the timeline until then is written.
    Run(Run),
    /// Put the timelines of several processes into one, with arrows between ranks
    ///
    /// OXITORCH_TRACE=trace-%r.json.gz has each process that torchrun starts write its own, by its rank.
    Merge(Merge),
}

#[derive(Args)]
pub(crate) struct Run {
    /// The file to write; compressed if its name ends with .gz
    #[arg(long, short, value_name = "FILE", default_value = "oxitorch-trace.json.gz")]
    output: PathBuf,
    /// A Python script with its arguments, or -m and a module
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true, value_name = "SCRIPT")]
    script: Vec<String>,
}

/// Runs the script; its exit status.
pub(crate) fn run(run: &Run, facts: &Facts) -> anyhow::Result<i32> {
    let file = std::path::absolute(&run.output)?;
    let folder = file.parent().unwrap_or(Path::new("/"));
    if !folder.is_dir() {
        bail!("{} is not a folder", folder.display());
    }
    // So that the one that is there afterwards is of this run.
    match fs::remove_file(&file) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            return Err(e).with_context(|| format!("cannot write {}", file.display()));
        }
        _ => {}
    }
    let status = script::run(&run.script, &[("OXITORCH_TRACE", file.as_os_str())], facts)?;
    say(&run.output, status);
    Ok(status)
}

/// On stderr, as stdout is the script's.
fn say(file: &Path, status: i32) {
    let dim = Style::new().dimmed();
    match fs::metadata(file) {
        Ok(facts) => {
            let name = AnsiColor::Cyan.on_default();
            anstream::eprintln!(
                "{name}{}{name:#}, {} {dim}→ open it at https://ui.perfetto.dev{dim:#}",
                file.display(),
                bytes(facts.len())
            );
        }
        Err(_) => {
            let yellow = AnsiColor::Yellow.on_default().bold();
            let why =
                if status > 128 { "the script was killed" } else { "the script did not use the device" };
            anstream::eprintln!("{yellow}no timeline{yellow:#}: {why}");
        }
    }
}

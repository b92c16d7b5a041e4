//! Developer automation: `cargo xtask <command>`.

mod claims;
mod op;
mod pages;
mod release;
mod schemas;

use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// A command: its name and arguments, what it does, and the function that does it.
type Row = (&'static str, &'static str, fn(&[String]) -> Result<()>);

const COMMANDS: &[Row] = &[
    (
        "op NAME [UNIT...] [--bless]",
        "test one op: its row, its golden, its calls and PyTorch's samples on the device",
        op::run,
    ),
    ("claims [--lines N]", "which numbers in pages are older than what they speak of", claims::run),
    ("pages [NAME...]", "write the generated pages of docs/, from what is installed in .venv", pages::run),
    (
        "schemas [--python PATH] [--check]",
        "write crates/aten/schemas.txt from a torch, or compare it",
        schemas::run,
    ),
    ("bindings INCLUDE", "write the bindings of PJRT from its C headers", pages::bindings),
    ("release VERSION", "set the version, date the changelog and build the wheel", release::run),
];

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match command(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            // Without a backtrace, which says nothing here.
            eprintln!("{e:#}");
            ExitCode::FAILURE
        }
    }
}

fn command(args: &[String]) -> Result<()> {
    let Some(name) = args.first() else {
        list();
        return Ok(());
    };
    let row = COMMANDS.iter().find(|(usage, ..)| usage.split(' ').next() == Some(name));
    let (.., run) = row.with_context(|| format!("no command `{name}`; `cargo xtask` lists them"))?;
    run(&args[1..])
}

fn list() {
    let width = COMMANDS.iter().map(|(usage, ..)| usage.len()).max().unwrap_or_default();
    for (usage, what, _) in COMMANDS {
        say(&format!("cargo xtask {usage:width$}  {what}"));
    }
}

#[allow(clippy::print_stdout, reason = "what a command answers")]
fn say(text: &str) {
    println!("{text}");
}

/// The root of the source tree.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map(Path::to_path_buf).unwrap_or_default()
}

/// What `git` prints.
fn git(dir: &Path, args: &[&str]) -> Result<String> {
    let output = Command::new("git").current_dir(dir).args(args).output().context("cannot run `git`")?;
    ensure!(
        output.status.success(),
        "git {}: {}",
        args.join(" "),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(String::from_utf8(output.stdout)?)
}

/// The Python of `.venv`, in the source tree, with the environment of `make test`.
fn python(root: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(root.join(".venv/bin/python"));
    command.current_dir(root).args(args);
    command.envs([("OMP_NUM_THREADS", "1"), ("PYTHONPATH", ""), ("PYTHONDONTWRITEBYTECODE", "")]);
    command.env("OXITORCH_TEST_CACHE", root.join("target/test-cache"));
    command
}

/// Runs a command whose output people see.
fn succeed(command: &mut Command) -> Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    let status = command.status().with_context(|| format!("cannot run `{program}`"))?;
    ensure!(status.success(), "`{program}` ended with {status}");
    Ok(())
}

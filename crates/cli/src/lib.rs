//! The `oxitorch` command.
//!
//! [`run`] takes the arguments and gives the exit status; `python -m oxitorch` and the binary of this crate both call it.
//! The main types are [`Facts`](facts::Facts), what the Python side knows about its interpreter, and
//! [`Check`](report::Check), one line of `oxitorch doctor`.
//!
//! This crate does not know PyTorch: it reads what packages say about themselves on disk and never imports anything.

mod audit;
mod cache;
mod diff;
mod doctor;
mod env;
mod facts;
mod graphs;
mod machine;
mod merge;
mod packages;
mod plugins;
mod preflight;
mod ranks;
mod report;
mod script;
mod selftest;
mod trace;

use std::ffi::OsString;
use std::io::{ErrorKind, Write};
use std::path::PathBuf;

use anyhow::Context;
use clap::builder::styling::{AnsiColor, Styles};
use clap::{Parser, Subcommand};

use facts::Facts;

/// What pages of reports look like, as CSS.
pub use oxitorch_page::STYLE;

const STYLES: Styles = Styles::styled()
    .header(AnsiColor::Green.on_default().bold())
    .usage(AnsiColor::Green.on_default().bold())
    .literal(AnsiColor::Cyan.on_default().bold())
    .placeholder(AnsiColor::Cyan.on_default());

/// PyTorch on TPUs, GPUs and CPUs through XLA
///
/// There is nothing to start: `import torch` finds the device, and a program says device="tpu".
/// This command looks at the installation.
#[derive(Parser)]
#[command(name = "oxitorch", version, styles = STYLES, max_term_width = 100, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Say what of a code base has to change, or will hurt, on TPUs and through XLA
    ///
    /// Reads Python, notebooks, launchers, requirements and extensions; runs nothing. Each finding has a line, a reason and
    /// a fix, and says whether oxitorch runs it unchanged. The exit status is 1 if something has to be changed.
    Audit(audit::Audit),
    /// Check the installation: versions, plugins, platform, compiler, caches, conflicts
    ///
    /// The exit status is 1 if anything is wrong that keeps the device from working.
    Doctor {
        /// Print JSON instead of text
        #[arg(long)]
        json: bool,
        /// The Python to check, if not the one this command belongs to
        #[arg(long, value_name = "PATH")]
        python: Option<PathBuf>,
    },
    /// List the environment variables, with what they are set to
    Env {
        /// Print JSON instead of text
        #[arg(long)]
        json: bool,
    },
    /// Manage the C++ shim, the one part that is built for each torch version
    Shim {
        #[command(subcommand)]
        command: Shim,
    },
    /// Look at the compiled programs on the disk, remove some, or fill the cache
    Cache {
        #[command(flatten)]
        which: cache::Which,
        #[command(subcommand)]
        command: cache::Do,
    },
    /// Look at the programs that a run has made: operations with their Python lines, StableHLO, optimized HLO, cost, memory
    Graphs {
        #[command(flatten)]
        which: graphs::Which,
        #[command(subcommand)]
        command: Option<graphs::Do>,
    },
    /// Compare the same script on two platforms, operation by operation: what differs first, and whether that is right
    ///
    /// Each run is a process; accelerators that the script names are the platform of its run. Recorded files of other
    /// machines are compared likewise. The exit status is 0 if all that differs is explained by rounding or ties, 1 if
    /// not, 2 if nothing could be compared.
    Diff(diff::Diff),
    /// Tell whether a training script fits a TPU slice and how fast it could be there, without a TPU
    ///
    /// The script runs unmodified, on a device that is not there: tensors have shapes and no data, nothing is computed,
    /// and it ends after some steps. libtpu compiles its programs for the slice. The exit status is 0 if it fits, 1 if
    /// not, 2 if that could not be told.
    Preflight(preflight::Preflight),
    /// Show what the processes of torch.distributed on this machine are about, and whom they wait for
    ///
    /// Each keeps its latest collectives in a file, which is there when the process hangs or was killed.
    Ranks(ranks::Ranks),
    /// Test what works on the hardware that is there, how fast it is, and how far off preflight is
    ///
    /// Takes a minute with --quick, else at most ten. The exit status is 0 if all is well and 1 if not.
    Selftest(selftest::Selftest),
    /// Write a PyTorch module as JAX source, run both, and say how far they differ
    #[command(disable_help_flag = true)]
    ToJax {
        /// A file or module and options; `oxitorch to-jax --help` has them
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Write a timeline of a script: what Python recorded, compiled, copied, waited for, and what the device ran
    Trace {
        #[command(subcommand)]
        command: trace::Do,
    },
    /// Compile captured programs for devices that are not there; `preflight` runs this as a child
    #[command(hide = true)]
    Aot(oxitorch_preflight::compile::aot::Work),
    /// Compile the programs of a folder for a slice, and say for each whether that was possible
    #[command(hide = true)]
    AotFolder(oxitorch_preflight::compile::folder::Folder),
    /// Load one plugin and print what it says; `doctor` runs this as a child, because a plugin may abort
    #[command(hide = true)]
    Probe {
        /// cpu, cuda or tpu
        platform: String,
        /// The plugin's library
        library: PathBuf,
    },
}

#[derive(Subcommand)]
enum Shim {
    /// Build the shim for the installed torch, also if there is one
    Build {
        /// The folder to write it to, under a name that tells what it fits [default: the cache folder]
        #[arg(long, value_name = "DIR")]
        into: Option<PathBuf>,
    },
}

/// Runs the command and returns the exit status: 0 well, 1 something is wrong, 2 bad arguments.
///
/// `facts` is the JSON that the Python side gives; without it, `python3` is asked.
pub fn run(argv: &[String], facts: Option<OsString>) -> i32 {
    let cli = match Cli::try_parse_from(argv) {
        Ok(cli) => cli,
        Err(e) => {
            // Help and version are "errors" with status 0 that go to stdout.
            let _ = e.print();
            return e.exit_code();
        }
    };
    match execute(cli.command, facts) {
        Ok(status) => status,
        Err(e) => {
            let red = AnsiColor::Red.on_default().bold();
            anstream::eprintln!("{red}error{red:#}: {e:#}");
            1
        }
    }
}

fn execute(command: Command, facts: Option<OsString>) -> anyhow::Result<i32> {
    let facts = |python: Option<PathBuf>| match (python, facts) {
        (None, Some(json)) => Facts::parse(json.to_str().context("OXITORCH_CLI_FACTS is not UTF-8")?),
        (python, _) => Facts::ask(&python.unwrap_or_else(|| "python3".into())),
    };
    match command {
        Command::Audit(asked) => {
            let (text, status) = audit::run(&asked);
            print(&text)?;
            Ok(status)
        }
        Command::Doctor { json, python } => {
            let report = doctor::examine(&facts(python)?);
            print(&if json { report.json()? } else { report.text() })?;
            Ok(i32::from(report.has_errors()))
        }
        Command::Env { json } => {
            let facts = facts(None)?;
            print(&if json { env::json(&facts)? } else { env::text(&facts) })?;
            Ok(0)
        }
        Command::Shim { command: Shim::Build { into } } => facts(None)?.build_shim(into.as_deref()),
        Command::Cache { which, command } => {
            let (text, status) = cache::run(&which, command, &facts(None)?)?;
            print(&text)?;
            Ok(status)
        }
        Command::Graphs { which, command } => {
            let (text, status) = graphs::run(&which, command, &facts(None)?)?;
            print(&text)?;
            Ok(status)
        }
        Command::Trace { command: trace::Do::Run(run) } => trace::run(&run, &facts(None)?),
        Command::Trace { command: trace::Do::Merge(merge) } => merge::run(&merge),
        Command::Ranks(asked) => {
            print(&ranks::run(&asked, &facts(None)?)?)?;
            Ok(0)
        }
        Command::Preflight(preflight) => {
            let (text, status) = preflight::run(preflight, &facts(None)?)?;
            print(&text)?;
            Ok(status)
        }
        Command::Diff(args) => diff::run(args, &facts(None)?),
        Command::Selftest(args) => selftest::run(&args, &facts(None)?),
        Command::ToJax { args } => {
            let module = ["-m", "oxitorch.to_jax"].map(str::to_owned);
            script::run(&[&module[..], &args[..]].concat(), &[], &facts(None)?)
        }
        Command::Aot(work) => oxitorch_preflight::compile::aot::compile(&work).map(|()| 0),
        Command::AotFolder(work) => {
            oxitorch_preflight::compile::folder::compile(&work, &preflight::environment(&facts(None)?))
                .map(|()| 0)
        }
        Command::Probe { platform, library } => {
            print(&plugins::probe(&platform, &library)?)?;
            Ok(0)
        }
    }
}

/// Writes to stdout, without colours where it is no terminal. A reader that went away (`| head`) is no error.
fn print(text: &str) -> anyhow::Result<()> {
    let mut out = anstream::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(()),
        other => other.context("cannot write to stdout"),
    }
}

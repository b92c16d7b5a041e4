//! The programs of a folder, compiled one by one for a slice: what becomes of each, and nothing about fitting.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use oxitorch_pjrt::{DiscoverOptions, Platform, discover};

use super::aot::{Compiling, Interrupted, Said, programs};
use super::outcome::{Effort, Outcome};
use super::plugin::plugin;
use crate::Environment;
use crate::hardware::Slice;

/// What is compiled, and for what.
#[derive(Args, Clone, Debug)]
pub struct Folder {
    /// v5e-1, cuda:h200, ...
    slice: String,
    /// The folder of captured programs
    folder: PathBuf,
}

/// Writes a line of JSON for each program: `id`, `compile_s`, `error`. It is compiled with little effort, and if that
/// fails with full effort, as `preflight` does. A program that ends the compiler's process has that as its error, and the
/// others are compiled in a new one.
pub fn compile(work: &Folder, environment: &Environment) -> anyhow::Result<()> {
    let slice = Slice::parse(&work.slice)?;
    let found =
        discover(&DiscoverOptions { python_paths: environment.site_dirs.clone(), ..Default::default() });
    let job = Job {
        library: &plugin(&found, slice.platform(), environment)?.path,
        folder: &work.folder,
        slice,
        environment,
    };
    let all: BTreeSet<String> = programs(&work.folder)?.into_iter().map(|p| p.id).collect();
    // For GPUs it compiles alike.
    let again = job.slice.platform() != Platform::Cuda;
    let mut failed = BTreeSet::new();
    job.run(all, Effort::Fast, |outcome| {
        if !again || outcome.error.is_none() {
            return write(outcome);
        }
        failed.insert(outcome.id.clone());
        Ok(())
    })?;
    job.run(failed, Effort::Full, write)
}

/// Where it is compiled.
struct Job<'a> {
    slice: Slice,
    library: &'a Path,
    folder: &'a Path,
    environment: &'a Environment,
}

impl Job<'_> {
    fn run(
        &self,
        all: BTreeSet<String>,
        effort: Effort,
        mut ended: impl FnMut(&Outcome) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let mut waiting = all;
        while !waiting.is_empty() {
            let (suspects, _) = self.child(&mut waiting, effort, &mut ended)?;
            // Which of them ended the process, each tells alone.
            for id in suspects {
                let (_, died) = self.child(&mut BTreeSet::from([id.clone()]), effort, &mut ended)?;
                if let Some(error) = died {
                    ended(&Outcome { id, error: Some(error), ..Outcome::default() })?;
                }
            }
        }
        Ok(())
    }

    /// Compiles what waits, as far as the child gets: those that it was at when it ended, and what it said then.
    fn child(
        &self,
        waiting: &mut BTreeSet<String>,
        effort: Effort,
        ended: &mut impl FnMut(&Outcome) -> anyhow::Result<()>,
    ) -> anyhow::Result<(BTreeSet<String>, Option<String>)> {
        let only: Vec<String> = std::mem::take(waiting).into_iter().collect();
        let what = (self.slice.platform(), self.library);
        let (topology, folder) = (self.slice.topology(), (self.folder, false));
        let mut child = Compiling::start(self.environment, what, topology, folder, None, (effort, &only))?;
        let (mut running, mut left) = (BTreeSet::new(), only.into_iter().collect::<BTreeSet<_>>());
        loop {
            match child.next() {
                Ok(Some(Said::Begun(id))) => {
                    left.remove(&id);
                    running.insert(id);
                }
                Ok(Some(Said::Done(outcome))) => {
                    running.remove(&outcome.id);
                    ended(&outcome)?;
                }
                Ok(Some(Said::Failed(why))) => anyhow::bail!(why),
                Ok(Some(Said::Device { .. })) => {}
                Ok(None) => return Ok((running, None)),
                Err(e) if running.is_empty() || e.is::<Interrupted>() => return Err(e),
                Err(e) => {
                    *waiting = left;
                    return Ok((running, Some(format!("{e:#}"))));
                }
            }
        }
    }
}

fn write(outcome: &Outcome) -> anyhow::Result<()> {
    let Outcome { id, compile_s, error, .. } = outcome;
    let line = serde_json::json!({ "id": id, "compile_s": compile_s, "error": error });
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}

//! Running a user's script as if it had been started with `python`.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use anyhow::Context;

use crate::facts::Facts;

/// Runs a script (or `-m` and a module) with its arguments and these variables; its exit status as a shell says it.
pub(crate) fn run(
    script: &[String],
    variables: &[(&str, &std::ffi::OsStr)],
    facts: &Facts,
) -> anyhow::Result<i32> {
    let status = Command::new(&facts.executable)
        .args(script)
        .envs(variables.iter().copied())
        .status()
        .with_context(|| format!("cannot run {}", facts.executable.display()))?;
    Ok(status.code().or_else(|| Some(128 + status.signal()?)).unwrap_or(1))
}

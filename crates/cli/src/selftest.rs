//! `oxitorch selftest`: runs the checks of `python/oxitorch/selftest` in a child, which a plugin may abort or hang.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anstyle::{AnsiColor, Style};
use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::facts::Facts;
use oxitorch_format::duration;

/// What is tested, and where to write it.
#[derive(clap::Args)]
pub(crate) struct Selftest {
    /// Less than a minute: without PyTorch's database of operations and preflight's prediction
    #[arg(long)]
    quick: bool,
    /// Write what was found as JSON into this file, to be sent along with a report
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Until the child says its first word: importing PyTorch, and building the shim if there is none.
const FIRST: Duration = Duration::from_secs(300);

/// A line of the child.
#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Begin { begin: String, limit_s: u64 },
    End(Ended),
    Checks { checks: usize },
    Device { device: Value },
}

#[derive(Deserialize)]
struct Ended {
    end: String,
    status: Status,
    found: String,
    measured: Value,
    seconds: f64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
enum Status {
    Pass,
    Skip,
    Fail,
    /// It ended the process.
    Crash,
    /// It did not end in its time.
    Hang,
}

/// One check.
#[derive(Clone, Debug, Serialize)]
struct Outcome {
    name: String,
    status: Status,
    found: String,
    measured: Value,
    seconds: f64,
}

impl Outcome {
    fn is_bad(&self) -> bool {
        !matches!(self.status, Status::Pass | Status::Skip)
    }

    fn line(&self) -> String {
        let (mark, style) = match self.status {
            Status::Pass => ("✓", AnsiColor::Green.on_default()),
            Status::Skip => ("-", Style::new().dimmed()),
            _ => ("✗", AnsiColor::Red.on_default().bold()),
        };
        let dim = Style::new().dimmed();
        let took = duration(Duration::from_secs_f64(self.seconds.max(0.0)));
        let (name, found) = (&self.name, &self.found);
        format!("  {style}{mark}{style:#} {name:NAME$} {dim}{took:>8}{dim:#}  {found}")
    }
}

/// Columns of a check's name.
const NAME: usize = 24;

/// All of it.
#[derive(Serialize)]
struct Report {
    version: &'static str,
    quick: bool,
    elapsed_s: f64,
    device: Value,
    /// `OXITORCH_*` and what plugins read, as far as they are set.
    environment: BTreeMap<String, String>,
    checks: Vec<Outcome>,
}

/// Runs the checks, showing each as it ends; 0 if all are well, 1 if not.
pub(crate) fn run(args: &Selftest, facts: &Facts) -> anyhow::Result<i32> {
    let began = Instant::now();
    let mut command = Command::new(&facts.executable);
    command.args(["-m", "oxitorch.selftest"]);
    if args.quick {
        command.arg("--quick");
    }
    let mut run = Run { command, ..Run::default() };
    run.finish(|outcome| anstream::println!("{}", outcome.line()))?;
    let set = facts
        .env
        .iter()
        .map(|v| (&v.name, &v.value))
        .chain(facts.env_foreign.iter().map(|v| (&v.name, &v.value)));
    let report = Report {
        version: env!("CARGO_PKG_VERSION"),
        quick: args.quick,
        elapsed_s: began.elapsed().as_secs_f64(),
        device: run.device,
        environment: set.filter_map(|(name, value)| Some((name.clone(), value.clone()?))).collect(),
        checks: run.outcomes,
    };
    if let Some(file) = &args.json {
        let text = serde_json::to_string_pretty(&report)? + "\n";
        std::fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))?;
    }
    anstream::println!("{}", report.sum(args));
    Ok(i32::from(report.checks.iter().any(Outcome::is_bad)))
}

impl Report {
    fn sum(&self, args: &Selftest) -> String {
        let bad = self.checks.iter().filter(|c| c.is_bad()).count();
        let count = |status| self.checks.iter().filter(|c| c.status == status).count();
        let style = if bad > 0 { AnsiColor::Red.on_default().bold() } else { AnsiColor::Green.on_default() };
        let device = self.device.get("name").and_then(Value::as_str);
        let device = device.map_or(String::new(), |name| format!("{name}: "));
        let verdict = match bad {
            0 => format!("{} well", count(Status::Pass)),
            _ => format!("{bad} of {} failed", self.checks.len()),
        };
        let skipped = match count(Status::Skip) {
            0 => String::new(),
            n => format!(", {n} skipped"),
        };
        let took = duration(Duration::from_secs_f64(self.elapsed_s));
        let more = match &args.json {
            Some(file) => format!("\nwritten to {}", file.display()),
            None if bad > 0 => "\nhint: --json FILE writes all of it down, for a report".to_owned(),
            None => String::new(),
        };
        format!("\n{device}{style}{verdict}{style:#}{skipped}, in {took}{more}")
    }
}

/// What the children said so far.
struct Run {
    command: Command,
    outcomes: Vec<Outcome>,
    device: Value,
    /// How many checks there are.
    checks: Option<usize>,
}

impl Default for Run {
    fn default() -> Self {
        Run { command: Command::new("false"), outcomes: Vec::new(), device: Value::Null, checks: None }
    }
}

impl Run {
    /// Starts children, each behind the check that ended the one before.
    fn finish(&mut self, show: impl Fn(&Outcome)) -> anyhow::Result<()> {
        while let Some(broken) = self.child(&show)? {
            show(&broken);
            let name = broken.name.clone();
            self.outcomes.push(broken);
            if self.checks == Some(self.outcomes.len()) {
                return Ok(());
            }
            let mut next = Command::new(self.command.get_program());
            let args: Vec<_> = self.command.get_args().map(ToOwned::to_owned).collect();
            let kept = args.iter().position(|a| a == "--after").unwrap_or(args.len());
            next.args(&args[..kept]).args(["--after", &name]);
            self.command = next;
        }
        Ok(())
    }

    /// Runs a child; the check that it did not survive.
    fn child(&mut self, show: &impl Fn(&Outcome)) -> anyhow::Result<Option<Outcome>> {
        let program = self.command.get_program().to_owned();
        let started = self.command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut child = started.with_context(|| format!("cannot run {}", program.display()))?;
        let (lines, errors) = (lines_of(child.stdout.take()), lines_of(child.stderr.take()));
        let mut running: Option<(String, Instant)> = None;
        let mut limit = FIRST;
        loop {
            match lines.recv_timeout(limit) {
                Ok(text) => {
                    match serde_json::from_str(&text).with_context(|| format!("a line of a child: {text}"))? {
                        Line::Begin { begin, limit_s } => {
                            running = Some((begin, Instant::now()));
                            limit = Duration::from_secs(limit_s);
                        }
                        Line::End(e) => {
                            running = None;
                            let Ended { end, status, found, measured, seconds } = e;
                            let outcome = Outcome { name: end, status, found, measured, seconds };
                            show(&outcome);
                            self.outcomes.push(outcome);
                        }
                        Line::Checks { checks } => self.checks = Some(checks),
                        Line::Device { device } => self.device = device,
                    }
                }
                Err(RecvTimeoutError::Timeout) => {
                    stop(&mut child);
                    let Some((name, since)) = running else {
                        bail!("the child said nothing for {} s", limit.as_secs())
                    };
                    let found = format!("did not end within {} s", limit.as_secs());
                    return Ok(Some(broken(name, Status::Hang, found, since)));
                }
                Err(RecvTimeoutError::Disconnected) => {
                    let status = child.wait()?;
                    let Some((name, since)) = running else {
                        if status.success() || self.checks == Some(self.outcomes.len()) {
                            return Ok(None); // what happens when a process ends well is no check's
                        }
                        bail!("the child {}: {}", ended(status), last(&errors));
                    };
                    let found = format!("the process {}: {}", ended(status), last(&errors));
                    return Ok(Some(broken(name, Status::Crash, found, since)));
                }
            }
        }
    }
}

fn broken(name: String, status: Status, found: String, since: Instant) -> Outcome {
    Outcome { name, status, found, measured: Value::Null, seconds: since.elapsed().as_secs_f64() }
}

fn ended(status: ExitStatus) -> String {
    match status.signal() {
        Some(signal) => format!("ended with signal {signal}"),
        None => format!("ended with status {}", status.code().unwrap_or(1)),
    }
}

/// Children of the child go on to hold its pipes, which nobody reads any more; those that the checks start end by themselves
/// in little more than a minute.
fn stop(child: &mut Child) {
    let _ = child.kill(); // an error: it has ended
    let _ = child.wait();
}

/// The last thing that was said, of what is there.
fn last(lines: &Receiver<String>) -> String {
    let mut last = None;
    while let Ok(line) = lines.recv_timeout(Duration::from_millis(100)) {
        if !line.trim().is_empty() {
            last = Some(line);
        }
    }
    last.unwrap_or_else(|| "it said nothing".into())
}

fn lines_of(pipe: Option<impl std::io::Read + Send + 'static>) -> Receiver<String> {
    let (send, receive) = channel();
    if let Some(pipe) = pipe {
        thread::spawn(move || {
            for line in BufReader::new(pipe).split(b'\n').map_while(Result::ok) {
                if send.send(String::from_utf8_lossy(&line).into_owned()).is_err() {
                    return;
                }
            }
        });
    }
    receive
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A child that says this, by a shell that gets `--after NAME` as its arguments.
    fn run(script: &str) -> anyhow::Result<Run> {
        let mut command = Command::new("sh");
        command.args(["-c", script, "sh"]);
        let mut run = Run { command, ..Run::default() };
        run.finish(|_| ())?;
        Ok(run)
    }

    const END: &str =
        r#"{"end": "b", "status": "pass", "found": "all", "measured": {"x": 1}, "seconds": 0.5}"#;

    fn statuses(run: &Run) -> Vec<(&str, Status)> {
        run.outcomes.iter().map(|o| (o.name.as_str(), o.status)).collect()
    }

    #[test]
    fn what_a_check_ends_is_begun_again_behind_it() {
        let script = format!(
            r#"echo '{{"checks": 2}}'
            if [ "$1" = --after ]; then echo '{{"begin": "b", "limit_s": 9}}'; echo '{END}'; exit 0; fi
            echo '{{"begin": "a", "limit_s": 9}}'; echo 'the reason' >&2; kill -ABRT $$"#
        );
        let run = run(&script).unwrap();
        assert_eq!(statuses(&run), [("a", Status::Crash), ("b", Status::Pass)]);
        assert_eq!(run.outcomes[0].found, "the process ended with signal 6: the reason");
        assert_eq!(run.outcomes[1].measured["x"], 1);
    }

    #[test]
    fn what_does_not_end_is_stopped() {
        let run = run(r#"echo '{"checks": 1}'; echo '{"begin": "a", "limit_s": 1}'; exec sleep 60"#).unwrap();
        assert_eq!(statuses(&run), [("a", Status::Hang)]);
        assert_eq!(run.outcomes[0].found, "did not end within 1 s");
    }

    #[test]
    fn a_child_that_never_begins_is_an_error() {
        let error = run("echo 'No module named torch' >&2; exit 1").err().unwrap();
        assert_eq!(error.to_string(), "the child ended with status 1: No module named torch");
    }
}

//! What goes on, on stderr: stdout is for the report.
//!
//! Lines that stay are said with [`say`]. What takes long has a [`Ticker`]: on a terminal one line below the others that
//! is written anew each second, elsewhere a line each half minute.

use std::io::{IsTerminal, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anstyle::Style;

/// The line that is written anew, while there is one on the terminal.
static LAST: Mutex<Option<String>> = Mutex::new(None);

/// Says something that stays, above the line that does not.
pub(crate) fn say(text: &str) {
    let last = lock(&LAST);
    if last.is_some() {
        erase();
    }
    let dim = Style::new().dimmed();
    anstream::eprintln!("{dim}preflight: {text}{dim:#}");
    if let Some(line) = &*last {
        draw(line);
    }
}

fn erase() {
    eprint!("\r\x1b[K");
}

/// A terminal that is too narrow cuts the line, instead of going on below.
fn draw(line: &str) {
    let dim = Style::new().dimmed();
    anstream::eprint!("\x1b[?7l{dim}preflight: {line}{dim:#}\x1b[?7h");
    let _ = std::io::stderr().flush();
}

fn lock<T>(what: &Mutex<T>) -> MutexGuard<'_, T> {
    what.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What is at work now, for instance programs that are compiled.
#[derive(Debug)]
struct Tasks {
    /// What is done with them: "compiling".
    verb: &'static str,
    /// What for.
    whence: String,
    all: usize,
    /// A key, its place, what it is, and since when.
    running: Vec<(String, usize, String, Instant)>,
    begun: usize,
    over: bool,
}

impl Tasks {
    /// `compiling 2 of 5 for v5e-1: gpt_step, 812 ops, 14 s`, of what runs longest.
    fn line(&self, now: Instant) -> Option<String> {
        let (_, place, what, since) = self.running.first()?;
        let more = match self.running.len() - 1 {
            0 => String::new(),
            n => format!(", and {n} more"),
        };
        let Tasks { verb, whence, all, .. } = self;
        Some(format!("{verb} {place} of {all}{whence}: {what}, {}{more}", elapsed(now - *since)))
    }
}

/// Whole seconds and minutes.
pub(crate) fn elapsed(time: Duration) -> String {
    match time.as_secs() {
        s if s < 60 => format!("{s} s"),
        s => format!("{} min {} s", s / 60, s % 60),
    }
}

/// Shows what is at work until it is dropped.
#[derive(Debug)]
pub(crate) struct Ticker {
    tasks: Arc<(Mutex<Tasks>, Condvar)>,
    thread: Option<JoinHandle<()>>,
    start: Instant,
    rewrites: bool,
}

impl Ticker {
    /// For so many tasks.
    pub(crate) fn start(verb: &'static str, whence: String, all: usize) -> Ticker {
        let dumb = std::env::var_os("TERM").is_none_or(|t| t == "dumb");
        let rewrites = std::io::stderr().is_terminal() && !dumb;
        let tasks = Tasks { verb, whence, all, running: Vec::new(), begun: 0, over: false };
        let tasks = Arc::new((Mutex::new(tasks), Condvar::new()));
        let shared = tasks.clone();
        let thread = std::thread::spawn(move || tick(&shared, rewrites));
        Ticker { tasks, thread: Some(thread), start: Instant::now(), rewrites }
    }

    /// A task has begun.
    pub(crate) fn begun(&self, key: &str, what: String) {
        let (tasks, changed) = &*self.tasks;
        let mut t = lock(tasks);
        t.begun += 1;
        let place = t.begun;
        if !self.rewrites {
            say(&format!("{} {place} of {}{}: {what}", t.verb, t.all, t.whence));
        }
        t.running.push((key.to_owned(), place, what, Instant::now()));
        changed.notify_all();
    }

    /// A task is over.
    pub(crate) fn ended(&self, key: &str) {
        let (tasks, changed) = &*self.tasks;
        lock(tasks).running.retain(|(k, ..)| k != key);
        changed.notify_all();
    }

    /// What is at work, and for how long.
    pub(crate) fn running(&self) -> Vec<String> {
        let now = Instant::now();
        let one = |(_, _, what, since): &(String, usize, String, Instant)| {
            format!("{what} for {}", elapsed(now - *since))
        };
        lock(&self.tasks.0).running.iter().map(one).collect()
    }

    /// Since it was started.
    pub(crate) fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        lock(&self.tasks.0).over = true;
        self.tasks.1.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // it does nothing that could panic but write to stderr
        }
    }
}

fn tick((tasks, changed): &(Mutex<Tasks>, Condvar), rewrites: bool) {
    let period = Duration::from_secs(if rewrites { 1 } else { 30 });
    let mut t = lock(tasks);
    let mut next = Instant::now() + period;
    while !t.over {
        if rewrites {
            show(t.line(Instant::now()));
        }
        t = changed
            .wait_timeout(t, next.saturating_duration_since(Instant::now()))
            .map_or_else(|e| e.into_inner().0, |w| w.0);
        if Instant::now() >= next {
            next += period;
            if let (false, false, Some(line)) = (rewrites, t.over, t.line(Instant::now())) {
                say(&line);
            }
        }
    }
    if rewrites {
        show(None);
    }
}

/// Writes the line that does not stay anew.
fn show(line: Option<String>) {
    let mut last = lock(&LAST);
    if last.is_some() {
        erase();
    }
    if let Some(line) = &line {
        draw(line);
    }
    *last = line;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_is_of_what_runs_longest() {
        let since = Instant::now();
        let running = |n: usize| {
            let one = |i: usize| (i.to_string(), i, format!("step{i}, {i}00 ops"), since);
            let running = (2..2 + n).map(one).collect();
            let whence = " for v5e-1".to_owned();
            Tasks { verb: "compiling", whence, all: 5, running, begun: 3, over: false }
        };
        let line = |n: usize, s: u64| running(n).line(since + Duration::from_secs(s));
        assert_eq!(line(0, 1), None);
        assert_eq!(line(1, 14).unwrap(), "compiling 2 of 5 for v5e-1: step2, 200 ops, 14 s");
        assert_eq!(
            line(2, 134).unwrap(),
            "compiling 2 of 5 for v5e-1: step2, 200 ops, 2 min 14 s, and 1 more"
        );
    }
}

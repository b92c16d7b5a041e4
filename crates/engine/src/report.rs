//! What the engine did, for people and for Prometheus.

use crate::engine::Engine;
use crate::metrics::{COMPILE_BUCKETS_MS, Collectives, DeviceReport};
use crate::timing::Parts;
use std::fmt::{self, Display, Write};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

// ---------------------------------------------------------------- Prometheus

/// Text in Prometheus' exposition format, version 0.0.4.
#[derive(Default)]
struct Exposition(String);

impl Exposition {
    /// A metric: what it counts, and a sample for each set of labels (`a="b"`, or nothing).
    fn metric<L: Display, V: Display>(
        &mut self,
        (name, kind, help): (&str, &str, &str),
        samples: impl IntoIterator<Item = (L, V)>,
    ) {
        self.head(name, kind, help);
        for (labels, value) in samples {
            self.sample(name, &labels.to_string(), &value);
        }
    }

    fn head(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a String does not fail.
        let _ = writeln!(self.0, "# HELP oxitorch_{name} {help}\n# TYPE oxitorch_{name} {kind}");
    }

    fn sample(&mut self, name: &str, labels: &str, value: &impl Display) {
        let _ = match labels {
            "" => writeln!(self.0, "oxitorch_{name} {value}"),
            labels => writeln!(self.0, "oxitorch_{name}{{{labels}}} {value}"),
        };
    }
}

/// A label whose value needs no escapes, or gets them.
struct Label<'a>(&'a str, &'a str);

impl Display for Label<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.1.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        write!(f, "{}=\"{value}\"", self.0)
    }
}

fn seconds(us: u64) -> f64 {
    us as f64 * 1e-6
}

impl Engine {
    /// Every device.
    pub fn devices(&self) -> Vec<DeviceReport> {
        self.own_devices().filter_map(|d| self.stream(d).ok()).map(|s| s.report()).collect()
    }

    /// Everything that is counted, as Prometheus reads it.
    pub fn prometheus(&self) -> String {
        let mut out = Exposition::default();
        self.counters(&mut out);
        self.gauges(&mut out);
        out.0
    }

    fn counters(&self, out: &mut Exposition) {
        let (m, cache) = (self.metrics(), self.cache());
        let version = format!(
            "{},{}",
            Label("version", env!("CARGO_PKG_VERSION")),
            Label("platform", self.target().platform().name())
        );
        out.metric(("info", "gauge", "Always 1; the labels say what runs."), [(version, 1)]);
        let one = |n: &std::sync::atomic::AtomicU64| [("", n.load(Relaxed))];
        out.metric(("ops_total", "counter", "Operations that were recorded."), one(&m.ops));
        out.metric(("programs_total", "counter", "Programs that were put together."), one(&m.programs));
        out.metric(("launches_total", "counter", "Programs that were launched."), one(&m.launches));
        let hits = [
            ("window", m.window_hits.load(Relaxed)),
            ("memory", m.cache_hits.load(Relaxed)),
            ("disk", cache.disk_hits.load(Relaxed)),
            ("shared", cache.shared_hits.load(Relaxed)),
        ];
        out.metric(
            ("cache_hits_total", "counter", "Programs that did not have to be compiled, by where they were."),
            hits.map(|(tier, n)| (Label("tier", tier), n)),
        );
        self.compile_histogram(out);
        out.metric(
            ("loads_total", "counter", "Programs that were loaded from a cache folder."),
            one(&m.loads),
        );
        out.metric(
            ("load_seconds_total", "counter", "Time to load them."),
            [("", seconds(m.load_us.load(Relaxed)))],
        );
        out.metric(
            ("flushes_total", "counter", "Windows that ended, by reason."),
            m.flushes().into_iter().map(|(reason, n)| (Label("reason", reason).to_string(), n)),
        );
        out.metric(
            ("fallbacks_total", "counter", "Operations that ran on the CPU."),
            m.fallbacks().into_iter().map(|(op, n)| (Label("op", &op).to_string(), n)),
        );
        let collectives = m.collectives();
        let each = |f: fn(&Collectives) -> f64| {
            collectives.iter().map(move |(name, of)| (Label("collective", name).to_string(), f(of)))
        };
        out.metric(
            ("collectives_total", "counter", "Collectives of several processes."),
            each(|c| c.count as f64),
        );
        out.metric(
            ("collective_bytes_total", "counter", "Bytes that they read, or wrote if that is more."),
            each(|c| c.bytes as f64),
        );
        out.metric(
            ("collective_seconds_total", "counter", "Time in them; those of several groups run at once."),
            each(|c| c.time.as_secs_f64()),
        );
        out.metric(
            ("collective_wait_seconds_total", "counter", "Time in which a launch or Python waited for them."),
            each(|c| c.waited.as_secs_f64()),
        );
        let directions = |a: &std::sync::atomic::AtomicU64, b: &std::sync::atomic::AtomicU64| {
            [("to_device", a.load(Relaxed)), ("to_host", b.load(Relaxed))]
                .map(|(direction, n)| (Label("direction", direction), n))
        };
        out.metric(
            ("transfers_total", "counter", "Copies between host and device."),
            directions(&m.transfers_h2d, &m.transfers_d2h),
        );
        out.metric(
            ("transfer_bytes_total", "counter", "Bytes of those copies."),
            directions(&m.bytes_h2d, &m.bytes_d2h),
        );
        out.metric(
            ("donations_total", "counter", "Inputs that were given to a program for its results."),
            one(&m.donations),
        );
        out.metric(("donated_bytes_total", "counter", "Bytes of those."), one(&m.bytes_donated));
        let (out_of, back) = ([&m.offloads, &m.bytes_offloaded], [&m.reloads, &m.bytes_reloaded]);
        let moved = |i: usize| {
            [("offload", out_of[i]), ("reload", back[i])]
                .map(|(how, n)| (Label("direction", how).to_string(), n.load(Relaxed)))
        };
        out.metric(("offloads_total", "counter", "Values that went to the host and came back."), moved(0));
        out.metric(("offloaded_bytes_total", "counter", "Bytes of those."), moved(1));
        let calls = [("replayed", &m.replays), ("played", &m.plays)];
        out.metric(
            ("graph_calls_total", "counter", "Calls of graphs of torch.compile."),
            calls.map(|(how, n)| (Label("how", how).to_string(), n.load(Relaxed))),
        );
        for (name, value) in cache.counters() {
            match name {
                "memory_hits" | "disk_hits" | "shared_hits" | "made" => {}
                name => match name.strip_suffix("_us") {
                    Some(base) => out.metric(
                        (&format!("cache_{base}_seconds_total"), "counter", "See docs/metrics.md."),
                        [("", seconds(value))],
                    ),
                    None => out.metric(
                        (&format!("cache_{name}_total"), "counter", "See docs/metrics.md."),
                        [("", value)],
                    ),
                },
            }
        }
    }

    fn compile_histogram(&self, out: &mut Exposition) {
        let m = self.metrics();
        out.head("compile_seconds", "histogram", "Time in the compiler, by program.");
        let mut sum = 0;
        let ends = COMPILE_BUCKETS_MS.iter().map(|&ms| (ms as f64 * 1e-3).to_string());
        for (end, n) in ends.chain(["+Inf".to_owned()]).zip(m.compile_times()) {
            sum += n;
            out.sample("compile_seconds_bucket", &Label("le", &end).to_string(), &sum);
        }
        out.sample("compile_seconds_sum", "", &seconds(m.compile_us.load(Relaxed)));
        out.sample("compile_seconds_count", "", &sum);
    }

    fn gauges(&self, out: &mut Exposition) {
        let devices: Vec<(String, DeviceReport)> = self
            .devices()
            .into_iter()
            .zip(self.own_devices())
            .map(|(d, i)| (Label("device", &i.to_string()).to_string(), d))
            .collect();
        let each = |f: fn(&DeviceReport) -> u64| devices.iter().map(move |(label, d)| (label, f(d)));
        out.metric(("memory_bytes", "gauge", "Device memory in use."), each(|d| d.memory));
        out.metric(("memory_peak_bytes", "gauge", "The most that was in use."), each(|d| d.memory_peak));
        out.metric(("memory_limit_bytes", "gauge", "Memory that there is."), each(|d| d.memory_limit));
        out.metric(
            ("known_programs", "gauge", "Sequences of operations whose programs are remembered."),
            each(|d| d.known_programs as u64),
        );
        out.metric(
            ("known_ops", "gauge", "Operations for different shapes that are remembered."),
            each(|d| d.known_ops as u64),
        );
        out.metric(("queue_launches", "gauge", "Launches that wait or run."), each(|d| d.queued_launches));
        out.metric(("queue_ops", "gauge", "Operations in those."), each(|d| d.queued_ops));
        out.metric(
            ("steps_total", "counter", "Optimizer steps that the device has done."),
            each(|d| d.split.steps),
        );
        let parts = |label: &str, p: Parts| {
            p.named().map(|(part, time)| (format!("{label},{}", Label("part", part)), time.as_secs_f64()))
        };
        out.metric(
            ("time_seconds_total", "counter", "Where the device's time went; see docs/metrics.md."),
            devices.iter().flat_map(|(label, d)| parts(label, d.split.all)),
        );
        out.metric(
            ("last_step_seconds", "gauge", "The same of the last step."),
            devices.iter().filter_map(|(label, d)| Some(parts(label, d.split.step?))).flatten(),
        );
    }
}

// ---------------------------------------------------------------- people

/// What to do about the largest part.
fn advice(part: &str) -> &'static str {
    match part {
        "python" => "the device waits for Python: larger batches, or torch.compile",
        "compile" => "programs are compiled: torch.tpu.explain() says why",
        "input" => "the device waits for data: more workers in the DataLoader, or smaller dtypes to copy",
        "sync" => {
            "values are read where the device could go on: .item(), .cpu(), printing; read every few steps"
        }
        _ => "the device is busy",
    }
}

/// "1,234,567".
fn count(n: u64) -> String {
    let digits = n.to_string();
    let groups: Vec<&str> =
        digits.as_bytes().rchunks(3).rev().filter_map(|g| str::from_utf8(g).ok()).collect();
    groups.join(",")
}

/// "1.5 MiB".
fn bytes(n: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = (n.max(1).ilog2() / 10).min(4);
    if unit == 0 {
        format!("{n} B")
    } else {
        format!("{:.1} {}", n as f64 / f64::from(unit * 10).exp2(), units[unit as usize])
    }
}

fn time(t: Duration) -> String {
    match t.as_secs_f64() {
        s if s < 1e-3 => format!("{:.0} us", s * 1e6),
        s if s < 1.0 => format!("{:.1} ms", s * 1e3),
        s => format!("{s:.2} s"),
    }
}

impl Engine {
    /// What happened so far, to be read by people.
    pub fn summary(&self) -> String {
        let mut out = String::new();
        let (m, cache) = (self.metrics(), self.cache());
        let get = |n: &std::sync::atomic::AtomicU64| count(n.load(Relaxed));
        for (d, i) in self.devices().iter().zip(self.own_devices()) {
            device(&mut out, i, d);
        }
        let mut line = |name: &str, text: String| _ = writeln!(out, "{name:10} {text}");
        line(
            "programs",
            format!("{} of {} ops, launched {} times", get(&m.programs), get(&m.ops), get(&m.launches)),
        );
        let us = |n: &std::sync::atomic::AtomicU64| time(Duration::from_micros(n.load(Relaxed)));
        line("compiled", format!("{} in {}", get(&m.compiles), us(&m.compile_us)));
        line(
            "cached",
            format!(
                "{} windows known, {} programs in memory, {} from the disk, {} from the shared folder",
                get(&m.window_hits),
                get(&m.cache_hits),
                get(&cache.disk_hits),
                get(&cache.shared_hits)
            ),
        );
        line("flushes", list(m.flushes().into_iter().map(|(reason, n)| (reason.to_owned(), n))));
        line("fallbacks", list(m.fallbacks()));
        line(
            "copies",
            format!(
                "{} to the device, {}; {} to the host, {}",
                get(&m.transfers_h2d),
                bytes(m.bytes_h2d.load(Relaxed)),
                get(&m.transfers_d2h),
                bytes(m.bytes_d2h.load(Relaxed))
            ),
        );
        let collectives = m.collectives();
        if !collectives.is_empty() {
            let one = |(name, c): (&String, &Collectives)| {
                format!(
                    "{} {name}, {}, {}, {} waited",
                    count(c.count),
                    bytes(c.bytes),
                    time(c.time),
                    time(c.waited)
                )
            };
            line("exchanged", collectives.iter().map(one).collect::<Vec<_>>().join("; "));
        }
        line("donated", format!("{} buffers, {}", get(&m.donations), bytes(m.bytes_donated.load(Relaxed))));
        out
    }
}

fn list(items: impl IntoIterator<Item = (String, u64)>) -> String {
    let all: Vec<String> = items.into_iter().map(|(name, n)| format!("{name} {}", count(n))).collect();
    if all.is_empty() { "none".to_owned() } else { all.join(", ") }
}

fn device(out: &mut String, index: usize, d: &DeviceReport) {
    let total = d.split.all.total();
    if total.is_zero() && d.memory_peak == 0 {
        return;
    }
    let head = |n: u64| format!("{} step{}", count(n), if n == 1 { "" } else { "s" });
    let last = if d.split.step.is_some() { "last step" } else { "" };
    let _ = writeln!(out, "{:10} {:>18} {last:>18}", format!("tpu:{index}"), head(d.split.steps));
    let share = |part: Duration, of: Duration| {
        let percent = 100.0 * part.as_secs_f64() / of.as_secs_f64().max(f64::MIN_POSITIVE);
        format!("{:>11} {percent:4.0} %", time(part))
    };
    let step = d.split.step.map(|s| (s.named(), s.total()));
    for (i, (name, part)) in d.split.all.named().into_iter().enumerate() {
        let last = step.map_or(String::new(), |(parts, all)| share(parts[i].1, all));
        let _ = writeln!(out, "  {name:8} {} {last}", share(part, total));
    }
    let of_step = d.split.step.unwrap_or(d.split.all).named();
    if let Some((part, _)) = of_step.iter().max_by_key(|(_, t)| *t).filter(|(_, t)| !t.is_zero()) {
        let _ = writeln!(out, "  bound by {part}: {}", advice(part));
    }
    let _ = writeln!(
        out,
        "  memory   {} in use, {} at most, of {}\n  queue    {} launches, {} ops",
        bytes(d.memory),
        bytes(d.memory_peak),
        bytes(d.memory_limit),
        count(d.queued_launches),
        count(d.queued_ops)
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::timing::Split;

    #[test]
    fn numbers_are_short() {
        assert_eq!([0, 999, 1000, 1_234_567].map(count), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!([0, 1023, 1024, 3 << 29].map(bytes), ["0 B", "1023 B", "1.0 KiB", "1.5 GiB"]);
        assert_eq!(time(Duration::from_micros(1500)), "1.5 ms");
    }

    #[test]
    fn labels_are_escaped() {
        assert_eq!(Label("op", "a\"b\\c\nd").to_string(), r#"op="a\"b\\c\nd""#);
        let mut out = Exposition::default();
        out.metric(("x_total", "counter", "Text."), [("", 3)]);
        out.metric(("y", "gauge", "Text."), [(Label("a", "b"), 1.5)]);
        let text = "# HELP oxitorch_x_total Text.\n# TYPE oxitorch_x_total counter\noxitorch_x_total 3\n\
                    # HELP oxitorch_y Text.\n# TYPE oxitorch_y gauge\noxitorch_y{a=\"b\"} 1.5\n";
        assert_eq!(out.0, text);
    }

    #[test]
    fn a_device_says_what_bounds_it() {
        let ms = Duration::from_millis;
        let step = Parts { python: ms(10), input: ms(30), device: ms(60), ..Parts::default() };
        let all = Parts { compile: ms(900), ..step };
        let report = DeviceReport {
            split: Split { all, step: Some(step), steps: 1 },
            queued_launches: 2,
            queued_ops: 1200,
            memory: 1 << 20,
            memory_peak: 2 << 20,
            memory_limit: 1 << 30,
            known_programs: 3,
            known_ops: 40,
        };
        let mut text = String::new();
        device(&mut text, 0, &report);
        let expected = "\
tpu:0                  1 step          last step
  python       10.0 ms    1 %     10.0 ms   10 %
  compile     900.0 ms   90 %        0 us    0 %
  input        30.0 ms    3 %     30.0 ms   30 %
  sync            0 us    0 %        0 us    0 %
  device       60.0 ms    6 %     60.0 ms   60 %
  bound by device: the device is busy
  memory   1.0 MiB in use, 2.0 MiB at most, of 1.0 GiB
  queue    2 launches, 1,200 ops
";
        assert_eq!(text, expected);
    }
}

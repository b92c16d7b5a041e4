//! Timelines in the trace event format, which Perfetto and Chrome open.
//!
//! Processes of the file are the threads of Python (waits and copies), what was recorded on each device (windows, in them
//! Python lines, in those operations), the compiler, collectives by their groups, and the devices (programs, waits for the compiler). An arrow goes
//! from the end of a window to the program that ran it.

use crate::events::{Heard, Span, Stamp, What};
use crate::site::{Site, describe};
use std::io::{self, Write};
use std::time::{Instant, UNIX_EPOCH};

/// Numbers of the file's processes; devices follow.
const PYTHON: u64 = 1;
const RECORDED: u64 = 2;
const COMPILER: u64 = 3;
const COLLECTIVES: u64 = 4;
const DEVICES: u64 = 10;

/// Lanes of a device.
const PROGRAMS: u64 = 1;
const STALLS: u64 = 2;

/// The Python line of a site.
fn line(site: Site) -> String {
    describe(site).unwrap_or_else(|| "an unknown line".to_owned())
}

/// `train.py:8` of `/home/me/train.py:8 in step`.
fn short(line: &str) -> &str {
    let place = line.split(" in ").next().unwrap_or(line);
    place.rsplit('/').next().unwrap_or(place)
}

/// Text as a JSON string.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// Arguments of an event as a JSON object; values are JSON.
fn object(fields: &[(&str, String)]) -> String {
    let fields: Vec<String> =
        fields.iter().map(|(name, value)| format!("{}:{value}", quoted(name))).collect();
    format!("{{{}}}", fields.join(","))
}

/// A place in the file: process and thread.
type Lane = (u64, u64);

struct Writer<'a, W: Write> {
    out: &'a mut W,
    start: Instant,
    first: bool,
}

impl<W: Write> Writer<'_, W> {
    fn event(&mut self, text: &str) -> io::Result<()> {
        let comma = if std::mem::take(&mut self.first) { "\n" } else { ",\n" };
        write!(self.out, "{comma}{text}")
    }

    /// Microseconds since the start, with three digits: times are whole nanoseconds, so that what nests, nests.
    fn at(&self, time: Instant) -> String {
        let ns = time.saturating_duration_since(self.start).as_nanos();
        format!("{}.{:03}", ns / 1000, ns % 1000)
    }

    fn slice(
        &mut self,
        (pid, tid): Lane,
        (category, name): (&str, &str),
        (start, end): (Instant, Instant),
        args: &[(&str, String)],
    ) -> io::Result<()> {
        let ns = end.max(start).saturating_duration_since(start.max(self.start)).as_nanos();
        self.event(&format!(
            r#"{{"ph":"X","pid":{pid},"tid":{tid},"cat":"{category}","name":{},"ts":{},"dur":{}.{:03},"args":{}}}"#,
            quoted(name),
            self.at(start),
            ns / 1000,
            ns % 1000,
            object(args)
        ))
    }

    /// One end of the arrow from a window to its program.
    fn arrow(&mut self, phase: &str, (pid, tid): Lane, number: u64, time: Instant) -> io::Result<()> {
        let at = self.at(time);
        self.event(&format!(
            r#"{{"ph":{phase},"pid":{pid},"tid":{tid},"cat":"launch","name":"launch","id":{number},"ts":{at}}}"#
        ))
    }

    fn name_process(&mut self, pid: u64, name: &str) -> io::Result<()> {
        let name = quoted(name);
        self.event(&format!(
            r#"{{"ph":"M","pid":{pid},"tid":0,"name":"process_name","args":{{"name":{name}}}}}"#
        ))?;
        self.event(&format!(
            r#"{{"ph":"M","pid":{pid},"tid":0,"name":"process_sort_index","args":{{"sort_index":{pid}}}}}"#
        ))
    }

    fn name_thread(&mut self, (pid, tid): Lane, name: &str) -> io::Result<()> {
        let name = quoted(name);
        self.event(&format!(
            r#"{{"ph":"M","pid":{pid},"tid":{tid},"name":"thread_name","args":{{"name":{name}}}}}"#
        ))
    }

    /// A window with the lines in it and the ops in those.
    fn window(
        &mut self,
        span: &Span,
        lane: Lane,
        ops: &[Stamp],
        args: &[(&str, String)],
        name: &str,
    ) -> io::Result<()> {
        self.slice(lane, ("window", name), (span.start, span.end), args)?;
        let lines: Vec<String> = ops.iter().map(|op| line(op.site)).collect();
        let mut first = 0;
        while first < ops.len() {
            let same = lines[first..].iter().take_while(|l| **l == lines[first]).count();
            let after = first + same;
            // An op takes from the end of the one before to its own.
            let began = |i: usize| if i == 0 { span.start } else { ops[i - 1].at };
            let count = [("ops", same.to_string()), ("line", quoted(&lines[first]))];
            let name = short(&lines[first]);
            self.slice(lane, ("line", name), (began(first), ops[after - 1].at), &count)?;
            for (i, op) in ops.iter().enumerate().take(after).skip(first) {
                self.slice(lane, ("op", op.inst.name()), (began(i), op.at), &[])?;
            }
            first = after;
        }
        Ok(())
    }

    fn span(&mut self, span: &Span) -> io::Result<()> {
        let (thread, times) = (span.thread as u64, (span.start, span.end));
        let python = (PYTHON, thread);
        let at = |site: &Site| [("line", quoted(&line(*site)))];
        match &span.what {
            What::Window { device, number, program, is_new, ended, ops, .. } => {
                let lane = (RECORDED, u64::from(*device) + 1);
                let mut args = vec![
                    ("window", number.to_string()),
                    ("ops", ops.len().to_string()),
                    ("program", quoted(if *is_new { "new" } else { "known" })),
                    ("ended by", quoted(ended.reason.name())),
                    ("at", quoted(&line(ended.site))),
                ];
                args.extend(ended.collective.as_ref().map(|which| ("collective", quoted(which))));
                self.window(span, lane, ops, &args, program)?;
                self.arrow(r#""s""#, lane, *number, span.end)
            }
            What::Wait { site } => {
                let name = format!("wait at {}", short(&line(*site)));
                self.slice(python, ("wait", &name), times, &at(site))
            }
            What::ToDevice { device, bytes, site } => {
                let args = [("bytes", bytes.to_string()), ("line", quoted(&line(*site)))];
                self.slice(python, ("copy", &format!("copy to tpu:{device}")), times, &args)
            }
            What::ToHost { device, bytes, site } => {
                let args = [("bytes", bytes.to_string()), ("line", quoted(&line(*site)))];
                self.slice(python, ("copy", &format!("copy from tpu:{device}")), times, &args)
            }
            What::Compile { program } => {
                self.slice((COMPILER, thread), ("compile", &format!("compile {program}")), times, &[])
            }
            What::Load { program } => {
                self.slice((COMPILER, thread), ("compile", &format!("load {program}")), times, &[])
            }
            What::Stall { device, number, program } => {
                let lane = (DEVICES + u64::from(*device), STALLS);
                let args = [("window", number.to_string())];
                self.slice(lane, ("compile", &format!("waits for {program}")), times, &args)
            }
            What::Collective { device, lane, about, call, bytes, site } => {
                let args = [
                    ("call", quoted(call)),
                    ("group", quoted(&about.group.name)),
                    ("number", about.number.to_string()),
                    ("bytes", bytes.to_string()),
                    ("device", format!("\"tpu:{device}\"")),
                    ("line", quoted(&line(*site))),
                ];
                self.slice((COLLECTIVES, *lane), ("collective", about.name), times, &args)
            }
            What::Execute { device, number, program, ops, donated } => {
                let lane = (DEVICES + u64::from(*device), PROGRAMS);
                let args = [
                    ("window", number.to_string()),
                    ("ops", ops.to_string()),
                    ("inputs overwritten", donated.to_string()),
                ];
                self.slice(lane, ("program", program), times, &args)?;
                if *number == 0 {
                    return Ok(()); // recorded before anybody listened
                }
                self.arrow(r#""f","bp":"e""#, lane, *number, span.start.max(self.start))
            }
        }
    }

    /// Where a span is shown.
    fn lane(span: &Span) -> (Lane, String, String) {
        let thread = span.thread as u64;
        let named = |pid, tid, process: &str, name: String| ((pid, tid), process.to_owned(), name);
        match &span.what {
            What::Window { device, .. } => {
                named(RECORDED, u64::from(*device) + 1, "recorded", format!("tpu:{device}"))
            }
            What::Wait { .. } | What::ToDevice { .. } | What::ToHost { .. } => {
                named(PYTHON, thread, "Python: waits and copies", String::new())
            }
            What::Compile { .. } | What::Load { .. } => named(COMPILER, thread, "compiler", String::new()),
            What::Collective { lane, about, .. } => {
                named(COLLECTIVES, *lane, "collectives", format!("group {}", about.group.name))
            }
            What::Stall { device, .. } => named(
                DEVICES + u64::from(*device),
                STALLS,
                &format!("tpu:{device}"),
                "waits for the compiler".into(),
            ),
            What::Execute { device, .. } => {
                named(DEVICES + u64::from(*device), PROGRAMS, &format!("tpu:{device}"), "programs".into())
            }
        }
    }
}

impl Heard {
    /// How many events the timeline has.
    pub fn len(&self) -> usize {
        self.spans.len()
    }

    /// Whether nothing happened.
    pub fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }

    /// Writes the timeline as JSON. `rank`: which of the processes of `torch.distributed` this is, if it is one.
    pub fn write_trace(&self, out: &mut impl Write, rank: Option<u32>) -> io::Result<()> {
        let mut spans: Vec<&Span> = self.spans.iter().collect();
        // In the order in which they began, and what holds others first.
        spans.sort_by_key(|s| (s.start, std::cmp::Reverse(s.end)));
        write!(
            out,
            r#"{{"displayTimeUnit":"ms","otherData":{{"writer":"oxitorch {}","#,
            env!("CARGO_PKG_VERSION")
        )?;
        write!(out, r#""duration_s":{},"#, self.end.duration_since(self.start).as_secs_f64())?;
        let began = self.wall.duration_since(UNIX_EPOCH).unwrap_or_default();
        write!(out, r#""began_unix_s":{}.{:09},"#, began.as_secs(), began.subsec_nanos())?;
        if let Some(rank) = rank {
            write!(out, r#""rank":{rank},"#)?;
        }
        write!(out, r#""events left out":{}}},"traceEvents":["#, self.dropped)?;
        let mut w = Writer { out: &mut *out, start: self.start, first: true };
        let mut seen: Vec<Lane> = Vec::new();
        for span in spans {
            let (lane, process, name) = Writer::<'_, Vec<u8>>::lane(span);
            if !seen.contains(&lane) {
                if seen.iter().all(|(pid, _)| *pid != lane.0) {
                    w.name_process(lane.0, &process)?;
                }
                let of_thread = self.threads.get(&span.thread).map_or("thread", String::as_str);
                w.name_thread(lane, if name.is_empty() { of_thread } else { &name })?;
                seen.push(lane);
            }
            w.span(span)?;
        }
        out.write_all(b"\n]}\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ending::Ended;
    use oxitorch_capture::Reason;
    use std::collections::BTreeMap;
    use std::time::Duration;

    #[test]
    fn a_timeline_is_json() {
        let start = Instant::now();
        let at = |us| start + Duration::from_micros(us);
        let span = |from, to, what| Span { what, start: at(from), end: at(to), thread: 7 };
        let run = What::Execute { device: 0, number: 3, program: "mm\"..add".into(), ops: 2, donated: 1 };
        let ended = Ended { reason: Reason::Collective, site: Site(0), collective: Some("send()".into()) };
        let window = What::Window {
            device: 0,
            number: 0,
            program: "neg".into(),
            is_new: true,
            ended,
            ops: Vec::new(),
            cut: start,
            launched_in: 0,
        };
        let spans = vec![span(10, 30, run), span(1, 5, What::Wait { site: Site(0) }), span(31, 32, window)];
        let threads = BTreeMap::from([(7, "python3".to_owned())]);
        let wall = std::time::SystemTime::now();
        let heard = Heard { spans, dropped: 0, threads, start, wall, end: at(40) };
        let mut text = Vec::new();
        heard.write_trace(&mut text, Some(3)).expect("memory does not fail");
        let text = String::from_utf8(text).expect("it is text");
        assert!(text.starts_with(r#"{"displayTimeUnit":"ms","otherData":{"writer":"oxitorch "#), "{text}");
        let events: Vec<&str> = text.lines().skip(1).map(|l| l.trim_end_matches(',')).collect();
        let expected = [
            r#"{"ph":"M","pid":1,"tid":0,"name":"process_name","args":{"name":"Python: waits and copies"}}"#,
            r#"{"ph":"M","pid":1,"tid":0,"name":"process_sort_index","args":{"sort_index":1}}"#,
            r#"{"ph":"M","pid":1,"tid":7,"name":"thread_name","args":{"name":"python3"}}"#,
            r#"{"ph":"X","pid":1,"tid":7,"cat":"wait","name":"wait at an unknown line","ts":1.000,"dur":4.000,"args":{"line":"an unknown line"}}"#,
            r#"{"ph":"M","pid":10,"tid":0,"name":"process_name","args":{"name":"tpu:0"}}"#,
            r#"{"ph":"M","pid":10,"tid":0,"name":"process_sort_index","args":{"sort_index":10}}"#,
            r#"{"ph":"M","pid":10,"tid":1,"name":"thread_name","args":{"name":"programs"}}"#,
            r#"{"ph":"X","pid":10,"tid":1,"cat":"program","name":"mm\"..add","ts":10.000,"dur":20.000,"args":{"window":3,"ops":2,"inputs overwritten":1}}"#,
            r#"{"ph":"f","bp":"e","pid":10,"tid":1,"cat":"launch","name":"launch","id":3,"ts":10.000}"#,
            r#"{"ph":"M","pid":2,"tid":0,"name":"process_name","args":{"name":"recorded"}}"#,
            r#"{"ph":"M","pid":2,"tid":0,"name":"process_sort_index","args":{"sort_index":2}}"#,
            r#"{"ph":"M","pid":2,"tid":1,"name":"thread_name","args":{"name":"tpu:0"}}"#,
            r#"{"ph":"X","pid":2,"tid":1,"cat":"window","name":"neg","ts":31.000,"dur":1.000,"args":{"window":0,"ops":0,"program":"new","ended by":"collective","at":"an unknown line","collective":"send()"}}"#,
            r#"{"ph":"s","pid":2,"tid":1,"cat":"launch","name":"launch","id":0,"ts":32.000}"#,
            "]}",
        ];
        assert_eq!(events, expected);
    }
}

//! What the collectives of a script's processes add to its step: recorded, not compiled, as each runs between programs.

use oxitorch_capture::Capture;

use crate::answer::{Called, CallingLine, Processes, Step};
use crate::hardware::Slice;
use crate::hardware::ici::{Sent, totals};

/// What so many processes send, of which the first was captured.
pub(crate) fn processes(count: u64, capture: &Capture, slice: &Slice) -> Processes {
    let collectives = called(capture, slice);
    let by_line = totals(collectives.iter().map(|c| (&c.line, &c.sent, 1)));
    let lines = by_line.into_iter().map(|(line, total)| CallingLine { line: line.clone(), total }).collect();
    Processes { count, collectives, lines }
}

/// The collectives of the last step, with the time that they take at least; a barrier sends nothing.
fn called(capture: &Capture, slice: &Slice) -> Vec<Called> {
    let last = capture.steps.saturating_sub(1);
    let mut all: Vec<Called> = Vec::new();
    for call in capture.group_calls.iter().filter(|c| c.step == last && c.r#type.is_some()) {
        let (name, line, backward) = (call.name.clone(), call.line.clone(), call.backward);
        let one = Called { name, line, backward, sent: call.into() };
        let is_like = |c: &&mut Called| {
            **c == Called { sent: Sent { count: c.sent.count, ..one.sent.clone() }, ..one.clone() }
        };
        match all.iter_mut().find(is_like) {
            Some(known) => known.sent.count += 1,
            None => all.push(one),
        }
    }
    all.iter_mut().for_each(|c| c.sent = c.sent.timed(slice));
    all
}

/// Adds them to the work of a step. Between two bounds, that all of it overlaps with what is computed and that nothing
/// does, nobody knows more before it runs.
pub(super) fn add(step: &mut Step, processes: &Processes) {
    let sent = || processes.collectives.iter().map(|c| (&c.sent, 1));
    step.send(sent());
    let ici: Option<f64> = sent().map(|(s, _)| s.ici_s).sum();
    let work = &mut step.work;
    step.without_overlap_s = work.roofline_s.zip(ici).map(|(computed, sent)| computed + sent);
    work.ici_s = ici;
    work.roofline_s = work.roofline_s.map(|s| s.max(ici.unwrap_or(0.0)));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::Work;
    use crate::hardware::ici::Total;
    use oxitorch_capture::GroupCall;

    fn call(step: u64, line: &str, name: &str, bytes: u64) -> GroupCall {
        let r#type = (bytes > 0).then(|| format!("float32[{}]", bytes / 4).parse().unwrap());
        let (ranks, backward) = (vec![0, 1, 2, 3], name == "reduce_scatter_tensor");
        GroupCall { step, line: Some(line.into()), backward, name: name.into(), ranks, r#type, bytes }
    }

    #[test]
    fn a_step_is_between_all_overlapped_and_nothing() {
        let slice = Slice::parse("v5e-4").unwrap();
        let giga = 1_000_000_000;
        let calls = [
            call(0, "a.py:1", "all_reduce", 4),
            call(1, "a.py:1", "all_gather_into_tensor", giga),
            call(1, "a.py:1", "barrier", 0),
            call(1, "a.py:1", "all_gather_into_tensor", giga),
            call(1, "a.py:1", "reduce_scatter_tensor", giga),
        ];
        let capture = Capture { steps: 2, group_calls: calls.into(), ..Capture::default() };
        let all = processes(4, &capture, &slice);
        let told: Vec<_> = all.collectives.iter().map(|c| (&*c.sent.kind, c.sent.count)).collect();
        assert_eq!(told, [("all-gather", 2), ("reduce-scatter", 1)]);
        let work = |s| Work { roofline_s: Some(s), ..Work::default() };
        // Three of three quarters of a gigabyte each, on two links of 50 GB/s.
        let sent = 3.0 * 0.75 / 100.0;
        for computed in [0.001, 1.0] {
            let mut step = Step { work: work(computed), ..Step::default() };
            add(&mut step, &all);
            let near = |found: Option<f64>, expected: f64| (found.unwrap() - expected).abs() < 1e-9;
            assert!(near(step.work.ici_s, sent) && near(step.work.roofline_s, sent.max(computed)));
            assert!(near(step.without_overlap_s, sent + computed), "{step:?}");
        }
    }

    #[test]
    fn where_links_are_not_known_no_time_is_said() {
        let calls = [("a.py:1", 8), ("a.py:2", 8), ("a.py:2", 12)];
        let calls = calls.map(|(line, bytes)| call(0, line, "all_reduce", bytes));
        let capture = Capture { steps: 1, group_calls: calls.into(), ..Capture::default() };
        let all = processes(4, &capture, &Slice::parse("cpu").unwrap());
        let mut step = Step::default();
        add(&mut step, &all);
        let sum = &step.collectives[0].total;
        assert_eq!((step.work.ici_s, step.without_overlap_s, sum.bytes), (None, None, 28));
        // Those of most bytes are first.
        let told: Vec<_> = all.lines.iter().map(|l| (l.line.as_deref(), &l.total)).collect();
        let total = |count, bytes| Total { count, bytes, ici_s: None };
        assert_eq!(told, [(Some("a.py:2"), &total(2, 20)), (Some("a.py:1"), &total(1, 8))]);
    }

    #[test]
    fn a_line_has_all_that_it_asks_for() {
        let giga = 1_000_000_000;
        let calls = [
            call(0, "a.py:1", "all_gather_into_tensor", giga),
            call(0, "a.py:2", "all_gather_into_tensor", giga),
            call(0, "a.py:2", "reduce_scatter_tensor", giga),
            call(0, "a.py:3", "barrier", 0),
        ];
        let capture = Capture { steps: 1, group_calls: calls.into(), ..Capture::default() };
        let lines = processes(4, &capture, &Slice::parse("v5e-4").unwrap()).lines;
        let told: Vec<_> = lines.iter().map(|l| (l.line.as_deref(), l.total.count, l.total.bytes)).collect();
        assert_eq!(told, [(Some("a.py:2"), 2, 2 * giga), (Some("a.py:1"), 1, giga)]);
        let seconds: Vec<f64> = lines.iter().map(|l| l.total.ici_s.unwrap()).collect();
        // Three quarters of a gigabyte each, on two links of 50 GB/s.
        assert!((seconds[0] - 0.015).abs() < 1e-9 && (seconds[1] - 0.0075).abs() < 1e-9, "{seconds:?}");
    }
}

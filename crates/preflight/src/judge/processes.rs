//! What the collectives of a script's processes add to its step: recorded, not compiled, as each runs between programs.

use oxitorch_capture::Capture;

use crate::answer::{Called, Processes, Step};
use crate::hardware::Slice;
use crate::hardware::ici::{self, Sent};

/// The collectives of the last step, with the time that they take at least; a barrier sends nothing.
pub(crate) fn called(capture: &Capture, slice: &Slice) -> Vec<Called> {
    let last = capture.steps.saturating_sub(1);
    let mut all: Vec<Called> = Vec::new();
    for call in capture.group_calls.iter().filter(|c| c.step == last && c.r#type.is_some()) {
        let one = Called { name: call.name.clone(), line: call.line.clone(), sent: call.into() };
        let is_like = |c: &&mut Called| {
            (&c.name, &c.line, &c.sent)
                == (&one.name, &one.line, &Sent { count: c.sent.count, ..one.sent.clone() })
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
    step.collectives.extend(ici::kinds(sent()));
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
    use oxitorch_capture::GroupCall;

    fn call(step: u64, name: &str, bytes: u64) -> GroupCall {
        let r#type = (bytes > 0).then(|| format!("float32[{}]", bytes / 4).parse().unwrap());
        GroupCall {
            step,
            line: Some("a.py:1".into()),
            name: name.into(),
            ranks: vec![0, 1, 2, 3],
            r#type,
            bytes,
        }
    }

    #[test]
    fn a_step_is_between_all_overlapped_and_nothing() {
        let slice = Slice::parse("v5e-4").unwrap();
        let giga = 1_000_000_000;
        let calls = [
            call(0, "all_reduce", 4),
            call(1, "all_gather_into_tensor", giga),
            call(1, "barrier", 0),
            call(1, "all_gather_into_tensor", giga),
            call(1, "reduce_scatter_tensor", giga),
        ];
        let capture = Capture { steps: 2, group_calls: calls.into(), ..Capture::default() };
        let collectives = called(&capture, &slice);
        let told: Vec<_> = collectives.iter().map(|c| (&*c.sent.kind, c.sent.count)).collect();
        assert_eq!(told, [("all-gather", 2), ("reduce-scatter", 1)]);
        let work = |s| Work { roofline_s: Some(s), ..Work::default() };
        // Three of three quarters of a gigabyte each, on two links of 50 GB/s.
        let sent = 3.0 * 0.75 / 100.0;
        for computed in [0.001, 1.0] {
            let mut step = Step { work: work(computed), ..Step::default() };
            add(&mut step, &Processes { count: 4, collectives: collectives.clone() });
            let near = |found: Option<f64>, expected: f64| (found.unwrap() - expected).abs() < 1e-9;
            assert!(near(step.work.ici_s, sent) && near(step.work.roofline_s, sent.max(computed)));
            assert!(near(step.without_overlap_s, sent + computed), "{step:?}");
        }
    }

    #[test]
    fn where_links_are_not_known_no_time_is_said() {
        let capture = Capture { steps: 1, group_calls: vec![call(0, "all_reduce", 8)], ..Capture::default() };
        let collectives = called(&capture, &Slice::parse("cpu").unwrap());
        let mut step = Step::default();
        add(&mut step, &Processes { count: 4, collectives });
        assert_eq!((step.work.ici_s, step.without_overlap_s, step.collectives[0].bytes), (None, None, 8));
    }
}

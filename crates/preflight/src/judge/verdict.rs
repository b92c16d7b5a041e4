//! From captured programs and what the compiler said of them to a verdict: does it fit, how fast could it be, why.

use oxitorch_capture::{Capture, Moved, Program};

use super::advice::{self, On};
use super::processes;
use crate::answer::{Judged, Judgement, Step};
use crate::compile::{Memory, Outcome};
use crate::hardware::{Chip, Work};
use crate::memory::{Padding, buffers, known_memory, largest, reported};
use crate::verdict::Verdict;

/// Adds what was captured and what the compiler made of it.
pub(crate) fn judge(judged: &mut Judged, chip: Option<&Chip>, capture: &Capture, outcomes: &[Outcome]) {
    let last = capture.steps.saturating_sub(1);
    // Executables stay in the device's memory.
    let code = |of: fn(&Outcome) -> Option<Memory>| outcomes.iter().filter_map(of).map(|m| m.code).sum();
    let (code, fast): (u64, u64) = (code(|o| o.memory), code(|o| o.fast.or(o.memory)));
    let limit = judged.limit_bytes;
    let strategy = judged.parallel.as_ref().map(|p| p.strategy);
    let trains = capture.programs.iter().any(|p| p.ops.iter().any(|o| o.backward));
    // How a step is split over processes is the script's own business.
    let strategy = strategy.or(judged.processes.as_ref().map(|_| "processes"));
    let on = On { chip, chips: judged.chips, strategy, trains };
    let judge = |p: &Program| {
        let outcome = outcomes.iter().find(|o| o.id == p.id);
        judgement(p, outcome, on, (last, [code, fast], limit))
    };
    judged.programs = capture.programs.iter().map(judge).collect();
    let told = |o: &Outcome| o.memory.is_some() || !o.out_of_memory;
    judged.need_is_least = !outcomes.iter().all(told);
    judged.need_bytes = judged.programs.iter().filter_map(|p| p.need_bytes).max();
    conclude(judged);
    let mut step = Step::default();
    let mut whole = true;
    for p in judged.programs.iter().filter(|p| p.launches_in_last_step > 0) {
        step.launches += p.launches_in_last_step;
        step.programs += 1;
        match &p.work {
            Some(work) => step.work.add(work, p.launches_in_last_step as f64),
            None => whole = false,
        }
    }
    step.send(
        judged.programs.iter().flat_map(|p| p.collectives.iter().map(|c| (c, p.launches_in_last_step))),
    );
    if let Some(processes) = &judged.processes {
        processes::add(&mut step, processes);
    }
    step.work.finish(chip);
    if !whole {
        step.without_overlap_s = None;
        step.work = Work { product_flops: step.work.product_flops, ..Work::default() };
    }
    judged.step = Some(step);
    let of_step = capture.programs.iter().map(|p| (p, p.launches_in(last))).filter(|(_, n)| *n > 0);
    // What tiles waste is known of TPUs.
    judged.padding = chip.filter(|c| c.gpu.is_none()).map(|c| Padding::of(c, of_step));
    judged.steps_captured = capture.steps;
    judged.resident_peak_bytes = capture.resident_peak_bytes;
    let of_last = |all: &[Moved]| all.iter().filter(|m| m.step == last).cloned().collect();
    judged.host_reads = of_last(&capture.reads);
    judged.host_writes = of_last(&capture.writes);
    judged.fallbacks = capture.fallbacks.clone();
}

/// The verdict from those of the programs: what does not fit counts more than what is not known.
fn conclude(judged: &mut Judged) {
    let has = |v: Verdict| judged.programs.iter().find(|p| p.verdict == v);
    judged.reason = None;
    judged.verdict = Verdict::Fits;
    for verdict in [Verdict::DoesNotFit, Verdict::Unknown, Verdict::FitsBarely] {
        if let Some(p) = has(verdict) {
            judged.verdict = verdict;
            judged.reason = p.error.as_ref().map(|e| format!("{}: {e}", p.name));
            return;
        }
    }
    if judged.programs.is_empty() {
        judged.verdict = Verdict::Unknown;
        judged.reason = Some("the script ran nothing on the device".to_owned());
    } else if judged.limit_bytes.is_none() {
        judged.verdict = Verdict::Unknown;
        judged.reason = Some("the memory of the device is not known".to_owned());
    }
}

fn judgement(
    p: &Program,
    outcome: Option<&Outcome>,
    on: On,
    (last, [code, fast_code], limit): (u64, [u64; 2], Option<u64>),
) -> Judgement {
    let full = outcome.filter(|o| o.out_of_memory);
    let memory = match (outcome.and_then(|o| o.memory), full) {
        (None, Some(o)) => Some(known_memory(p, o.error.as_deref().unwrap_or_default())),
        (known, _) => known,
    };
    let need = memory.map(|m| p.beside_bytes + m.peak + code);
    let verdict = match (need, limit) {
        _ if full.is_some() => Verdict::DoesNotFit,
        (Some(need), Some(limit)) => Verdict::of(need, limit),
        _ => Verdict::Unknown,
    };
    let fast = outcome.and_then(|o| o.fast).map(|m| p.beside_bytes + m.peak + fast_code);
    let peak = outcome.and_then(|o| o.at_peak.as_ref());
    let all = peak.map_or_else(Vec::new, |peak| buffers(p, peak));
    let (buffers_at_peak, buffers_rest_bytes) = peak.map_or((Vec::new(), 0), |peak| reported(&all, peak));
    let tight = matches!(verdict, Verdict::DoesNotFit | Verdict::FitsBarely);
    let advice = if tight { advice::of(p, &all, on, need.unwrap_or(0)) } else { Vec::new() };
    let not_reached = || Some("it was not compiled".to_owned());
    Judgement {
        id: p.id.clone(),
        name: p.name.clone(),
        ops: p.ops.len(),
        first_line: p.first_line.clone(),
        ended_by: p.ended_by,
        ended_by_collective: p.ended_by_collective.clone(),
        ended_at: p.ended_at.clone(),
        launches: p.launches.iter().map(|(_, n)| n).sum(),
        launches_in_last_step: p.launches_in(last),
        verdict,
        error: outcome.map_or_else(not_reached, |o| o.error.clone()),
        compile_s: outcome.map_or(0.0, |o| o.compile_s),
        effort: outcome.map(|o| o.effort).unwrap_or_default(),
        fast_need_bytes: fast,
        need_bytes: need,
        beside_bytes: p.beside_bytes,
        memory_bytes: memory,
        why: p.why.clone(),
        tensors: largest(p),
        undonated: p.undonated.clone(),
        buffers_at_peak,
        buffers_rest_bytes,
        advice,
        work: outcome.and_then(|o| work(p, on.chip, o)),
        collectives: outcome.and_then(|o| o.collectives.clone()).unwrap_or_default(),
    }
}

/// What a program has to do on a chip; none if the compiler did not say.
fn work(p: &Program, chip: Option<&Chip>, outcome: &Outcome) -> Option<Work> {
    let (flops, bytes_accessed) = (outcome.flops?, outcome.bytes_accessed?);
    let passed = |c: &Chip| p.products.iter().map(|p| p.flops * c.passes(p.dtype, p.precision)).sum::<f64>();
    let times = chip.map(|c| (passed(c) / c.device_flops(), bytes_accessed / c.device_bytes_per_s()));
    let ici = outcome.collectives.as_ref().map(|all| all.iter().filter_map(|c| c.ici_s).sum::<f64>());
    let mut work = Work {
        flops,
        product_flops: p.product_flops(),
        bytes_accessed,
        mxu_s: times.map(|t| t.0),
        hbm_s: times.map(|t| t.1),
        ici_s: ici,
        roofline_s: times.map(|t| t.0.max(t.1).max(ici.unwrap_or(0.0))),
        ..Work::default()
    };
    work.finish(chip);
    Some(work)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::Slice;
    use oxitorch_capture::{Input, Op, Output, Products};
    use oxitorch_hlo::{DType, Precision};

    fn capture() -> Capture {
        let op = |op: &str, line: Option<&str>| Op {
            op: op.into(),
            line: line.map(str::to_owned),
            ..Op::default()
        };
        let ty = |n: u64| format!("float32[{n}]").parse().unwrap();
        let product = Products {
            dtype: DType::F32,
            precision: Precision::Highest,
            batch: 1.0,
            m: 1e4,
            n: 5e3,
            k: 1e4,
            op: Some("mm".into()),
            line: Some("a.py:3".into()),
            count: 1,
            flops: 1e12,
        };
        let x = Input { line: Some("a.py:1".into()), donated: true, ..Input::new(ty(1000), 4000) };
        let program = Program {
            id: "a".into(),
            name: "mm".into(),
            ops: vec![op("mm", Some("a.py:3")), op("add", None)],
            inputs: vec![x, Input::new(ty(500), 2000)],
            outputs: vec![Output::new(Some(ty(1000)), 4000, 0)],
            launches: vec![(0, 1), (1, 2)],
            beside_bytes: 1000,
            products: vec![product],
            ..Program::default()
        };
        let read = |step, count, bytes| Moved { step, line: Some("a.py:1".into()), count, bytes };
        Capture {
            steps: 2,
            programs: vec![program],
            reads: vec![read(0, 9, 9), read(1, 1, 4)],
            resident_peak_bytes: 7000,
            ..Capture::default()
        }
    }

    fn compiled() -> Outcome {
        let memory = Memory { peak: 8000, code: 1000, ..Memory::default() };
        let (flops, bytes_accessed) = (Some(2e12), Some(819e9 * 0.001));
        Outcome { id: "a".into(), memory: Some(memory), flops, bytes_accessed, ..Outcome::default() }
    }

    fn judged(limit: u64, outcome: Outcome) -> Judged {
        let slice = Slice::parse("v5e-1").unwrap();
        let mut judged = Judged::unknown(&slice, "nothing was done".into());
        judged.limit_bytes = Some(limit);
        judge(&mut judged, slice.chip(), &capture(), &[outcome]);
        judged
    }

    #[test]
    fn what_is_besides_and_the_code_need_memory_too() {
        for (limit, verdict) in
            [(9999, Verdict::DoesNotFit), (10_000, Verdict::FitsBarely), (11_000, Verdict::Fits)]
        {
            let judged = judged(limit, compiled());
            assert_eq!((judged.verdict, judged.need_bytes), (verdict, Some(10_000)), "{limit}");
        }
    }

    #[test]
    fn a_step_is_the_last_one() {
        let judged = judged(20_000, compiled());
        let step = judged.step.unwrap();
        assert_eq!((step.launches, step.programs, step.work.flops), (2, 1, 4e12));
        // Six passes for each of two products, at 197 TFLOP/s.
        let expected = 2.0 * 6e12 / 197e12;
        assert!((step.work.roofline_s.unwrap() / expected - 1.0).abs() < 1e-9);
        assert_eq!(step.work.bound, Some("mxu"));
        assert!((step.work.mfu_ceiling.unwrap() - 1.0 / 6.0).abs() < 1e-9);
        assert_eq!(judged.host_reads.iter().map(|m| m.count).sum::<u64>(), 1);
    }

    #[test]
    fn out_of_memory_is_a_verdict_with_numbers() {
        let error =
            "E1000: the total memory required for HLO temporaries (47.50G) exceeds available HBM (15.75G)";
        let outcome =
            Outcome { id: "a".into(), error: Some(error.into()), out_of_memory: true, ..Outcome::default() };
        let judged = judged(1 << 34, outcome);
        assert_eq!(judged.verdict, Verdict::DoesNotFit);
        let memory = judged.programs[0].memory_bytes.unwrap();
        assert_eq!(
            (memory.arguments, memory.aliased, memory.temporaries),
            (6000, 4000, (47.5 * 1024f64.powi(3)) as u64)
        );
        assert_eq!(judged.need_bytes, Some(1000 + 6000 + memory.temporaries));
    }

    #[test]
    fn the_largest_tensors_have_lines() {
        let judged = judged(20_000, compiled());
        let told: Vec<_> = judged.programs[0]
            .tensors
            .iter()
            .map(|t| (t.role, t.bytes, t.overwritten, t.line.as_deref()))
            .collect();
        let expected = [
            ("argument", 4000, true, Some("a.py:1")),
            ("output", 4000, false, Some("a.py:3")),
            ("argument", 2000, false, None),
        ];
        assert_eq!(told, expected);
    }

    #[test]
    fn other_errors_are_no_verdict() {
        let outcome = Outcome { id: "a".into(), error: Some("odd".into()), ..Outcome::default() };
        let judged = judged(1 << 34, outcome);
        assert_eq!((judged.verdict, judged.reason), (Verdict::Unknown, Some("mm: odd".into())));
    }
}

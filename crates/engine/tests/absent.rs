//! A device that is not there: everything up to the launch is as ever, and what was asked of it is kept.

use common::{MUL, MUL_, Rig, Tensor, donors, options, wrapped};
use oxitorch_capture::{Capture, Modules, Role};
use oxitorch_engine::{AbsentDevice, ArgRef, Mode, Reason, Site, Target};
use oxitorch_hlo::DType;
use oxitorch_pjrt::Platform;
use oxitorch_testkit::fake_plugin::FakePlugin;

mod common;

const KIND: &str = "TPU v0";

fn absent_with(change: impl FnOnce(&mut AbsentDevice)) -> Rig {
    let mut device = AbsentDevice {
        platform: Platform::Tpu,
        kind: KIND.to_owned(),
        memory: 1 << 20,
        reads_as: 2.0,
        steps: 2,
        marked: false,
    };
    change(&mut device);
    Rig::of(FakePlugin::new(), Target::Absent(device), &options())
}

fn absent() -> Rig {
    absent_with(|_| ())
}

fn captured(rig: &Rig) -> (Capture, Modules) {
    rig.engine.captured(Site(99)).unwrap().unwrap()
}

/// A step of training: a batch, a weight that is multiplied, an optimizer. Nothing of a batch is left after it.
fn step(rig: &Rig, weight: &Tensor) {
    let x = rig.at(1).floats();
    let y = rig.at(2).one(MUL, &[x.arg(), weight.arg()]);
    let rate = 0.9f64.to_le_bytes();
    rig.at(3).dispatch(MUL_, &[weight.arg(), ArgRef::Tensor(wrapped(&rate))]).unwrap();
    drop(x);
    rig.at(4).cut(Reason::Step);
    rig.engine.absent().into_iter().for_each(|device| device.stepped(1, true));
    drop(y);
}

#[test]
fn programs_are_kept_with_their_launches_by_step() {
    let rig = absent();
    let weight = rig.at(10).floats();
    (0..3).for_each(|_| step(&rig, &weight));
    let (capture, modules) = captured(&rig);
    assert_eq!(capture.steps, 3);
    let [program] = &capture.programs[..] else { panic!("{:?}", capture.programs) };
    assert_eq!(program.launches, [(0, 1), (1, 1), (2, 1)]);
    assert_eq!(program.ended_by, Some(Reason::Step));
    assert_eq!(program.ended_at.as_deref(), Some("script.py:4"));
    let ops: Vec<_> = program.ops.iter().map(|o| (o.op.as_str(), o.line.as_deref().unwrap())).collect();
    assert_eq!(ops, [("mul.Tensor", "script.py:2"), ("mul.Tensor", "script.py:3")]);
    let lines: Vec<_> = program.inputs.iter().map(|i| (i.line.as_deref(), i.donated)).collect();
    assert_eq!(lines[..2], [(Some("script.py:1"), true), (Some("script.py:10"), true)]);
    assert!(program.why.as_ref().unwrap().launched.contains("an optimizer made its step"));
    // The text is what a compiler would get, and says where each op comes from.
    let [(id, text)] = &modules[..] else { panic!() };
    assert_eq!(*id, program.id);
    assert_eq!(donors(text), (3, vec![0, 1]));
    assert!(text.contains("aten::mul.Tensor#0"), "{text}");
}

#[test]
fn a_step_that_waits_for_the_end_of_its_gradients_is_counted_when_it_is_launched() {
    let rig = absent();
    let weight = rig.at(10).floats();
    for follows in [true, false, true] {
        let x = rig.at(1).floats();
        rig.at(2).dispatch(MUL_, &[weight.arg(), x.arg()]).unwrap();
        assert!(rig.engine.step(1, (true, true), rig.at(4).site()).unwrap());
        if follows {
            assert!(rig.engine.dropped_gradients(rig.at(5).site()).unwrap());
        }
    }
    let (capture, _) = captured(&rig);
    let [program] = &capture.programs[..] else { panic!("{:?}", capture.programs) };
    assert_eq!((capture.steps, &program.launches[..]), (3, &[(0, 1), (1, 1), (2, 1)][..]));
}

#[test]
fn the_programs_are_those_of_a_device_that_is_there() {
    let run = |rig: &Rig| {
        let weight = rig.at(10).floats();
        (0..3).for_each(|_| step(rig, &weight));
        rig.sync().unwrap();
        rig.engine.graphs(0).into_iter().map(|g| (g.id, g.donated, g.ops.len())).collect::<Vec<_>>()
    };
    let there = {
        let rig = Rig::new();
        let graphs = run(&rig);
        assert_eq!(rig.fake.programs().len(), graphs.len());
        graphs
    };
    assert_eq!(run(&absent()), there);
}

#[test]
fn nothing_is_compiled_or_computed() {
    let rig = absent();
    let x = rig.uploaded(DType::F32, &[1 << 19], 1);
    let y = rig.neg(&x);
    rig.sync().unwrap();
    assert_eq!(rig.fake.calls("PJRT_Client_Compile"), 0);
    assert_eq!(rig.fake.calls("PJRT_Client_BufferFromHostBuffer"), 0);
    // Who reads gets the number, and what is few bytes of the host is known.
    assert_eq!(rig.read(&y).unwrap(), 2f32.to_le_bytes().repeat(1 << 19));
    assert!(rig.read(&x).unwrap() == 2f32.to_le_bytes().repeat(1 << 19), "2 MiB are not kept");
    let small = rig.uploaded(DType::S64, &[2], 7);
    assert_eq!(rig.read(&small).unwrap(), [7; 16]);
    assert_eq!(rig.read(&small.narrow(1, 1)).unwrap(), [7; 8]);
    let e = rig.engine.target().client().map(drop).unwrap_err();
    assert!(e.message.contains(KIND), "{e}");
}

#[test]
fn reads_copies_and_fallbacks_are_kept_by_line_and_step() {
    let rig = absent();
    let weight = rig.at(10).floats();
    step(&rig, &weight);
    let y = rig.at(20).neg(&weight);
    rig.at(21).read(&y).unwrap();
    rig.at(21).read(&y.narrow(0, 1)).unwrap();
    rig.engine.fell_back("aten::sort", Site(22));
    rig.engine.fell_back("aten::sort", Site(22));
    let (capture, _) = captured(&rig);
    let writes: Vec<_> =
        capture.writes.iter().map(|w| (w.step, w.line.as_deref().unwrap(), w.count, w.bytes)).collect();
    assert_eq!(writes, [(0, "script.py:1", 1, 16), (0, "script.py:10", 1, 16)]);
    let reads: Vec<_> = capture.reads.iter().map(|r| (r.step, r.line.as_deref().unwrap(), r.count)).collect();
    assert_eq!(reads, [(1, "script.py:21", 2)]);
    let [fell_back] = &capture.fallbacks[..] else { panic!() };
    assert_eq!((fell_back.step, fell_back.op.as_str(), fell_back.count), (1, "aten::sort", 2));
    assert!(!capture.described);
    rig.engine.absent().unwrap().describe();
    assert!(captured(&rig).0.described);
}

#[test]
fn memory_is_what_would_be_alive() {
    let rig = absent();
    let x = rig.uploaded(DType::F32, &[256], 1);
    let y = rig.neg(&x);
    rig.cut(Reason::Step);
    assert_eq!(rig.bytes(), 2048);
    let z = rig.relu(&y);
    drop(y);
    rig.cut(Reason::Step);
    assert_eq!(rig.bytes(), 2048, "in the memory of `y`");
    drop((x, z));
    assert_eq!(rig.bytes(), 0);
    let (capture, _) = captured(&rig);
    assert_eq!(capture.resident_peak_bytes, 2048);
    assert_eq!(capture.programs[1].beside_bytes, 1024, "`x`, which the program does not take");
    assert_eq!(capture.programs[1].donated_bytes(), 1024);
    // What does not fit is recorded too: that is what is asked.
    let huge = rig.uploaded(DType::F32, &[1 << 20], 1);
    let more = rig.neg(&huge);
    rig.cut(Reason::Step);
    assert_eq!(rig.bytes(), 8 << 20);
    drop(more);
}

#[test]
fn windows_end_where_they_would() {
    let rig = absent();
    assert_eq!(rig.engine.window(), rig.stream().default_limits());
    assert_eq!(rig.engine.window().bytes, 8 << 20, "by the memory that it has not");
    let x = rig.uploaded(DType::F32, &[1 << 16], 1);
    let mut kept: Vec<Tensor> = (0..65).map(|i| rig.at(i).neg(&x)).collect();
    assert_eq!(rig.flushes(|| ()), Default::default());
    assert_eq!(rig.metrics().flushes()["bytes"], 2);
    rig.cut(Reason::Step);
    // Long windows are captured whole.
    let mut y = rig.at(0).neg(&x);
    for i in 0..2000 {
        y = if i % 20 == 0 { rig.relu(&y.narrow(0, 4)) } else { rig.neg(&y) };
    }
    kept.push(y);
    rig.cut(Reason::Step);
    assert_eq!(rig.metrics().counters().iter().find(|(name, _)| *name == "splits").unwrap().1, 0);
    assert_eq!(captured(&rig).0.programs.last().unwrap().ops.len() / 1000, 2);
    rig.mode(Mode::Strict);
    kept.push(rig.relu(&x));
    assert_eq!(captured(&rig).0.programs.last().unwrap().ended_by, Some(Reason::Mode));
}

#[test]
fn values_have_roles() {
    let rig = absent();
    let weight = rig.at(10).floats();
    let device = rig.engine.absent().unwrap();
    for _ in 0..2 {
        device.label(&weight.slot, Role::ALL[0], "layer.weight");
        step(&rig, &weight);
    }
    let (capture, _) = captured(&rig);
    let label = &capture.programs[0].inputs[1].label;
    assert!(label.role == Role::ALL[0], "{label:?}");
    assert_eq!(label.name.as_deref(), Some("layer.weight"));
}

#[test]
fn inputs_that_no_result_overwrites_are_named() {
    let rig = absent();
    let x = rig.at(1).uploaded(DType::F32, &[1 << 16], 1);
    let y = rig.at(2).cast(&x, DType::F64);
    drop(x);
    rig.at(3).cut(Reason::Step);
    rig.engine.absent().unwrap().stepped(1, true);
    let (capture, _) = captured(&rig);
    let undonated = &capture.programs[0].undonated;
    assert_eq!(undonated.iter().map(|u| (u.input, u.bytes)).collect::<Vec<_>>(), [(0, 1 << 18)]);
    drop(y);
}

#[test]
fn it_is_over_after_the_steps_that_were_asked_for() {
    let rig = absent();
    let weight = rig.floats();
    let device = rig.engine.absent().unwrap();
    step(&rig, &weight);
    assert!(!device.is_over());
    step(&rig, &weight);
    assert!(device.is_over());
}

#[test]
fn who_marks_steps_says_when_they_end() {
    let rig = absent_with(|device| device.marked = true);
    let weight = rig.floats();
    let device = rig.engine.absent().unwrap();
    (0..5).for_each(|_| step(&rig, &weight));
    assert!(!device.is_over(), "optimizers do not");
    device.marked();
    device.marked();
    assert!(device.is_over());
}

#[test]
fn a_device_that_is_there_captures_nothing() {
    let rig = Rig::new();
    assert!(rig.engine.absent().is_none() && rig.engine.captured(Site(1)).unwrap().is_none());
}

#[test]
fn programs_can_be_forbidden_there_too() {
    let rig = absent();
    assert!(rig.stream().plugin_memory().unwrap().is_none());
    let x = rig.floats();
    rig.engine.allow_programs(Some(0));
    let y = rig.at(3).neg(&x);
    let e = rig.read(&y).unwrap_err();
    assert!(e.message.contains("max_graphs"), "{e}");
}

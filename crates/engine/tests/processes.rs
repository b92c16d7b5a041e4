//! Collectives of several processes as programs of theirs, with real processes: on a plugin whose client spans them.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use common::processes::Member;
use common::{Rig, Tensor, client, error, options};
use oxitorch_engine::{Collective, Engine, Mode, Numbered, Options, Reduction, Slot, Target, Work};
use oxitorch_hlo::DType;
use oxitorch_pjrt::Platform;
use oxitorch_testkit::fake_plugin::FakePlugin;
use oxitorch_testkit::processes::all_pass;

mod common;

const SUM: Collective = Collective::AllReduce(Reduction::Sum);

fn put(rig: &Rig, values: &[f32]) -> Tensor {
    let tensor = Tensor::new(DType::F32, &[values.len() as i64]);
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    rig.stream().write_host(&tensor.by_ref(), &bytes, rig.site(), rig.engine.switches().mode).unwrap();
    tensor
}

fn floats(rig: &Rig, tensor: &Tensor) -> Vec<f32> {
    let bytes = rig.read(tensor).unwrap();
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn done(work: &Work) -> bool {
    (0..2000).any(|_| {
        std::thread::sleep(Duration::from_millis(5));
        work.outcome().is_some()
    })
}

/// What a member has, of what all members had.
type Reference = fn(&[Vec<f32>], usize) -> Vec<f32>;

const KINDS: &[(Collective, Reference)] = &[
    (SUM, |all, _| (0..4).map(|i| all.iter().map(|p| p[i]).sum()).collect()),
    (Collective::AllReduce(Reduction::Max), |all, _| {
        (0..4).map(|i| all.iter().map(|p| p[i]).fold(f32::MIN, f32::max)).collect()
    }),
    (Collective::AllGather, |all, _| all.concat()),
    (Collective::ReduceScatter(Reduction::Sum), |all, at| {
        let part = 4 / all.len();
        (at * part..(at + 1) * part).map(|i| all.iter().map(|p| p[i]).sum()).collect()
    }),
    (Collective::AllToAll, |all, at| {
        let part = 4 / all.len();
        all.iter().flat_map(|p| p[at * part..(at + 1) * part].to_vec()).collect()
    }),
    (Collective::Permute(vec![]), |_, _| vec![0.0; 4]),
    (Collective::Broadcast(1), |all, _| all[1].clone()),
];

/// Each kind, in these groups, of which this process is in one.
fn run_kinds(member: &Member, groups: &[Vec<i32>]) {
    let group = groups.iter().find(|g| g.contains(&(member.index() as i32))).unwrap();
    let at = group.iter().position(|&id| id as usize == member.index()).unwrap();
    let of = |id: i32| (0..4).map(|i| (10 * id + i) as f32).collect::<Vec<f32>>();
    let all: Vec<Vec<f32>> = group.iter().map(|&id| of(id)).collect();
    for (what, reference) in KINDS {
        member.rig.line.set(member.rig.line.get() + 1);
        let x = put(&member.rig, &of(member.index() as i32));
        let wanted = reference(&all, at);
        let out = Tensor::new(DType::F32, &[wanted.len() as i64]);
        let work = member.collective(what, groups, &x, &out, what.name()).unwrap();
        assert_eq!(floats(&member.rig, &out), wanted, "{what:?} {groups:?}");
        assert!(done(&work) && work.outcome().unwrap().is_ok());
    }
}

#[test]
fn two_processes_compute_every_kind() {
    all_pass("two_processes_compute_every_kind", 2, |process| {
        let member = Member::new(process);
        for mode in [Mode::Fused, Mode::Strict, Mode::Debug] {
            member.rig.mode(mode);
            run_kinds(&member, &member.all());
        }
        run_kinds(&member, &[vec![1, 0]]);
    });
}

#[test]
fn groups_of_four_processes_are_programs_of_their_own() {
    all_pass("groups_of_four_processes_are_programs_of_their_own", 4, |process| {
        let member = Member::new(process);
        run_kinds(&member, &member.all());
        // Halves, and processes that lie apart: the others of this program are those of the own group alone.
        let (half, apart) = (process.index as i32 / 2, process.index as i32 % 2);
        run_kinds(&member, &[vec![2 * half, 2 * half + 1]]);
        run_kinds(&member, &[vec![apart, apart + 2]]);
        // Or all groups in one program.
        run_kinds(&member, &[vec![0, 3], vec![2, 1]]);
        assert_eq!(member.rig.metrics().isolations.load(Relaxed), 0);
    });
}

#[test]
fn a_loop_of_ops_and_collectives_makes_no_new_programs() {
    all_pass("a_loop_of_ops_and_collectives_makes_no_new_programs", 2, |process| {
        let member = Member::new(process);
        let rig = &member.rig;
        let mut x = put(rig, &[1.0 + member.index() as f32, 2.0]);
        let mut programs = Vec::new();
        for round in 0..6 {
            rig.at(100 + round);
            let y = rig.neg(&x);
            let out = Tensor::new(DType::F32, &[2]);
            member.collective(&SUM, &member.all(), &y, &out, "sum").unwrap();
            x = out;
            programs.push(rig.metrics().programs.load(Relaxed));
        }
        // (1 + 2, 2 + 2), times -2 in each round that follows.
        assert_eq!(floats(rig, &x), [96.0, 128.0]);
        assert_eq!(programs[1..], [programs[1]; 5], "{programs:?}");
        // What nobody sees was overwritten: there is one value.
        assert_eq!(rig.bytes(), 8);
        member.meet("end");
    });
}

#[test]
fn how_a_process_keeps_its_tensor_makes_no_other_program() {
    all_pass("how_a_process_keeps_its_tensor_makes_no_other_program", 2, |process| {
        let member = Member::new(process);
        let rig = &member.rig;
        // One reads its tensor through a view, and nobody sees what is read: it may be overwritten.
        let x = Tensor::new(DType::F32, &[[2, 1], [1, 2]][member.index()]);
        let bytes: Vec<u8> = [1f32, 2.0].iter().flat_map(|v| v.to_le_bytes()).collect();
        rig.stream().write_host(&x.by_ref(), &bytes, rig.site(), Mode::Fused).unwrap();
        let seen = if member.index() == 0 { x.view(&[2], &[1], 0) } else { put(rig, &[1.0, 2.0]) };
        let out = Tensor::new(DType::F32, &[2]);
        member.collective(&SUM, &member.all(), &seen, &out, "sum").unwrap();
        assert_eq!(floats(rig, &out), [2.0, 4.0]);
        assert_eq!(floats(rig, &seen), [1.0, 2.0]);
        member.meet("end");
    });
}

#[test]
fn a_collective_in_place_overwrites_what_was_there() {
    all_pass("a_collective_in_place_overwrites_what_was_there", 2, |process| {
        let member = Member::new(process);
        let rig = &member.rig;
        let x = put(rig, &[1.0, 2.0]);
        let y = rig.neg(&x);
        for round in 1..4 {
            rig.at(round);
            member.collective(&SUM, &member.all(), &y, &y, "sum").unwrap();
        }
        assert_eq!(floats(rig, &y), [-8.0, -16.0]);
        assert_eq!((rig.bytes(), rig.metrics().donations.load(Relaxed)), (16, 3));
        member.meet("end");
    });
}

#[test]
fn python_waits_for_nobody() {
    all_pass("python_waits_for_nobody", 2, |process| {
        let member = Member::new(process);
        let rig = &member.rig;
        let x = put(rig, &[1.0, 2.0]);
        let out = Tensor::new(DType::F32, &[2]);
        if member.index() == 1 {
            // Only when the other has recorded all of its collective, which it does without this one.
            member.store.get("recorded", Duration::from_secs(20)).unwrap();
        }
        let work = member.collective(&SUM, &member.all(), &x, &out, "sum").unwrap();
        let y = rig.neg(&out);
        if member.index() == 0 {
            assert!(work.outcome().is_none());
            member.store.put("recorded", b"").unwrap();
        }
        assert_eq!(floats(rig, &y), [-2.0, -4.0]);
    });
}

#[test]
fn processes_that_do_not_do_the_same_are_told_and_launch_nothing() {
    all_pass("processes_that_do_not_do_the_same_are_told_and_launch_nothing", 2, |process| {
        let member = Member::new(process);
        let rig = &member.rig;
        let x = put(rig, &[1.0, 2.0]);
        let out = Tensor::new(DType::F32, &[2]);
        let what = [SUM, Collective::AllReduce(Reduction::Max)][member.index()].clone();
        let words = ["sum", "max"][member.index()];
        let work = member.collective(&what, &member.all(), &x, &out, words).unwrap();
        let e = rig.read(&out).unwrap_err();
        assert!(e.message.contains(&format!("is about {}", ["max", "sum"][member.index()])), "{e}");
        assert!(done(&work) && work.outcome().unwrap().is_err());
        // What does not need it goes on.
        assert_eq!(floats(rig, &rig.neg(&x)), [-1.0, -2.0]);
        member.meet("end");
    });
}

#[test]
fn who_cannot_take_part_says_so() {
    all_pass("who_cannot_take_part_says_so", 2, |process| {
        let member = Member::new(process);
        let rig = &member.rig;
        let x = put(rig, &[1.0, 2.0]);
        let out = Tensor::new(DType::F32, &[2]);
        // When it is launched, or already when it is recorded: less than the result alone.
        for (line, bytes) in [(1, 12.0), (2, 4.0)] {
            rig.at(line);
            let memory = rig.stream().memory();
            if member.index() == 1 {
                memory.set_fraction(bytes / memory.total() as f64);
            }
            let recorded = member.collective(&SUM, &member.all(), &x, &out, "sum").map(drop);
            let e = recorded.and_then(|()| rig.read(&out).map(drop)).unwrap_err();
            let words = ["process 1 is about nothing: tpu:0 out of memory", "out of memory"][member.index()];
            assert!(e.message.contains(words), "{e}");
            memory.set_fraction(1.0);
            member.meet(&format!("end {line}"));
        }
    });
}

#[test]
fn groups_that_cannot_be_are_refused_here() {
    all_pass("groups_that_cannot_be_are_refused_here", 2, |process| {
        let member = Member::new(process);
        let x = put(&member.rig, &[1.0, 2.0]);
        let own = member.index() as i32;
        let refused = |groups: &[Vec<i32>], words: &str| {
            let e = member.collective(&SUM, groups, &x, &x, "sum").map(drop).unwrap_err();
            assert!(e.message.starts_with("all_reduce: ") && e.message.contains(words), "{e}");
        };
        refused(&[vec![1 - own]], "1 of 2 devices are in no group");
        refused(&[vec![0, 1, 2]], "device 2 takes no part in tpu:0");
        refused(&[vec![0, 1, 1]], "once");
        refused(&[vec![0, 1], vec![]], "groups of 2 and of 0 members");
        refused(&[], "without a member");
        let three = put(&member.rig, &[1.0; 3]);
        let (site, mode) = (member.rig.site(), Mode::Fused);
        let scatter = Collective::ReduceScatter(Reduction::Sum);
        let e = member.rig.stream().collective(&scatter, &member.all(), &three.by_ref(), site, mode);
        let e = error(e.map(drop).unwrap_err());
        assert!(e.message.contains("2"), "{e}");
        member.meet("end");
    });
}

#[test]
fn the_own_device_has_its_number_among_those_of_the_machine() {
    let fake = FakePlugin::new();
    let target = Target::Client(client(&fake, Platform::Tpu).unwrap());
    let start = |first, count| {
        let numbered = Some(Numbered { first, count });
        Engine::start(target.clone(), &Options { numbered, ..options() })
    };
    let wrong = start(4, 4).map(drop).unwrap_err();
    assert!(wrong.message.contains("1 device(s) from tpu:4 on are not among 4"), "{wrong}");
    let engine = start(2, 4).unwrap();
    assert_eq!((engine.device_count(), engine.own_devices()), (4, 2..3));
    let refused = |device| error(engine.stream(device).map(drop).unwrap_err()).message.to_string();
    assert!(refused(1).contains("tpu:1 is the device of another process, and this one has tpu:2"));
    assert!(refused(3).contains("hint: torch.tpu.set_device(2)"));
    assert!(refused(4).contains("tpu device index 4 does not exist: there are 4 device(s)"));
    let stream = engine.stream(2).unwrap();
    let tensor = Tensor::new(DType::F32, &[2]);
    let tensor = Tensor { slot: Slot::new(tensor.bytes(), 2).into(), ..tensor };
    let (site, bytes) = (common::HERE, [7; 8]);
    stream.write_host(&tensor.by_ref(), &bytes, site, Mode::Strict).unwrap();
    let mut read = [0; 8];
    stream.read_host(&tensor.by_ref(), &mut read, site).unwrap();
    assert_eq!(read, bytes);
    engine.close();
    drop((tensor, engine));
}

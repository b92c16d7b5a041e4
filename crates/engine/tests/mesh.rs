//! Programs and values of several devices, on the fake plugin: what is compiled and launched where, what memory it takes,
//! and what happens when something fails.

use std::sync::atomic::Ordering::Relaxed;

use common::meshes::{OnMesh, collective};
use common::{MUL_, NEG, RELU, Rig, Tensor, donors, error, options, wrapped};
use oxitorch_engine::{AbsentDevice, ArgRef, Collective, Mesh, Mode, Reduction, Target};
use oxitorch_hlo::DType;
use oxitorch_pjrt::Platform;
use oxitorch_testkit::fake_plugin::FakePlugin;

mod common;

const F32: DType = DType::F32;

/// Four devices as a square, of five.
fn square() -> OnMesh {
    let rig = Rig::on(FakePlugin::new().devices(5), Platform::Tpu);
    OnMesh::new(rig, &[("x", 2), ("y", 2)], &[3, 1, 0, 4])
}

fn bytes(count: usize) -> Vec<u8> {
    (0..count).map(|i| i as u8).collect()
}

#[test]
fn a_value_is_cut_on_its_way_in_and_put_together_on_its_way_out() {
    let on = square();
    let ways: [&[&[&str]]; 5] = [&[], &[&["x"]], &[&[], &["y"]], &[&["y"], &["x"]], &[&["x", "y"]]];
    for dims in ways {
        let parts: usize = on.cut(dims).parts();
        let copies = on.rig.fake.calls("PJRT_Client_BufferFromHostBuffer");
        let x = on.put(F32, &[4, 6], dims, &bytes(96));
        assert_eq!(on.rig.fake.calls("PJRT_Client_BufferFromHostBuffer") - copies, 4);
        let local = 96 / parts as u64;
        assert_eq!(on.bytes(), [local, local, 0, local, local], "{dims:?}");
        assert_eq!(on.read(&x).unwrap(), bytes(96), "{dims:?}");
        let rows = x.view(&[2, 6], &[12, 1], 0);
        assert_eq!(on.read(&rows).unwrap(), [&bytes(96)[..24], &bytes(96)[48..72]].concat(), "{dims:?}");
    }
    assert_eq!(on.bytes(), [0; 5]);
    assert_eq!(on.rig.fake.programs().len(), 0, "reading makes no program");
}

#[test]
fn a_window_is_one_program_that_the_compiler_splits() {
    let on = square();
    let (x, y) = (on.put(F32, &[4, 4], &[&["x"]], &bytes(64)), on.put(F32, &[4, 4], &[], &bytes(64)));
    let sum = on.add(&x, &y);
    let cut = on.reshard(&on.unary(NEG, &sum), &[&["y"], &["x"]]);
    let text = on.rig.compiled(|| _ = on.read(&sum).unwrap());
    let [text] = &text[..] else { panic!("{text:?}") };
    assert!(text.contains(r#"sdy.mesh @mesh = <["x"=2, "y"=2]>"#), "{text}");
    for sharding in [
        r#"%arg0: tensor<4x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}"#,
        r#"-> (tensor<4x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {}]>}"#,
        r#"tensor<4x4xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"y"}, {"x"}]>}) {"#,
    ] {
        assert!(text.contains(sharding), "{sharding}\n{text}");
    }
    assert_eq!(on.rig.fake.calls("PJRT_LoadedExecutable_Execute"), 1);
    // Half, all, all, and a quarter.
    assert_eq!(on.bytes(), [32 + 64 + 64 + 16, 176, 0, 176, 176]);
    assert_eq!(on.read(&cut).unwrap().len(), 64);
}

#[test]
fn programs_are_known_by_how_their_inputs_are_cut() {
    let on = square();
    let compiled = |dims: &[&[&str]]| {
        let x = on.put(F32, &[4, 4], dims, &bytes(64));
        on.rig.compiled(|| _ = on.read(&on.unary(NEG, &x)).unwrap()).len()
    };
    assert_eq!((compiled(&[&["x"]]), compiled(&[&["x"]]), compiled(&[&["y"]]), compiled(&[])), (1, 0, 1, 1));
    assert_eq!((compiled(&[&["y"], &[]]), compiled(&[&[], &["y"]])), (0, 1));
}

#[test]
fn inputs_that_nobody_sees_are_overwritten_on_every_device() {
    let on = square();
    let x = on.reshard(&on.put(F32, &[4, 4], &[], &bytes(64)), &[&["x"]]);
    on.bytes();
    let factor = 2f64.to_le_bytes();
    on.call(MUL_, &[x.arg(), ArgRef::Tensor(wrapped(&factor))]);
    let given = || on.rig.metrics().donations.load(Relaxed);
    let before = given();
    // A copy on each device takes nobody's place: what was there was a half.
    assert_eq!((on.bytes(), given() - before), (vec![64, 64, 0, 64, 64], 0));
    on.call(MUL_, &[x.arg(), ArgRef::Tensor(wrapped(&factor))]);
    assert_eq!((on.bytes(), given() - before), (vec![64, 64, 0, 64, 64], 1));
    let last = on.rig.fake.programs().pop().unwrap();
    assert_eq!(donors(&last).1, [0], "{last}");
    on.read(&x).unwrap();
}

#[test]
fn a_launch_that_fails_fails_its_values_with_their_line() {
    let on = square();
    let x = on.put(F32, &[4, 4], &[&["x"]], &bytes(64));
    on.rig.fake.fail_once("PJRT_LoadedExecutable_Execute", 13, "no");
    let y = on.unary(
        {
            on.rig.at(7);
            NEG
        },
        &x,
    );
    let e = on.read(&y).unwrap_err();
    assert!(e.message.contains("no") && e.message.contains("script.py:7"), "{e}");
    on.read(&on.unary(NEG, &x)).unwrap();
    let after = on.read(&on.unary(RELU, &y)).unwrap_err();
    assert!(after.message.contains("script.py:7"), "{after}");
}

#[test]
fn a_window_that_fails_runs_op_by_op_on_all_devices() {
    let on = square();
    let x = on.put(F32, &[4, 4], &[&["x"]], &bytes(64));
    on.rig.fake.refuse("stablehlo.maximum");
    let kept = on.reshard(&on.unary(NEG, &x), &[&["x"], &["y"]]);
    on.rig.at(9);
    let lost = on.unary(RELU, &kept);
    let e = on.read(&lost).unwrap_err();
    assert!(e.message.contains("script.py:9"), "{e}");
    on.read(&kept).unwrap();
    assert_eq!(on.rig.metrics().isolations.load(Relaxed), 1);
    assert_eq!(on.bytes(), [32 + 16, 48, 0, 48, 48]);
}

#[test]
fn what_one_device_fails_to_compute_is_an_error_for_who_reads() {
    let on = square();
    let x = on.put(F32, &[4, 4], &[&["x"]], &bytes(64));
    on.rig.fake.fail_on_device(1, 13, "a bit fell over");
    let y = on.reshard(
        &on.unary(
            {
                on.rig.at(4);
                NEG
            },
            &x,
        ),
        &[&["x", "y"]],
    );
    let e = on.read(&y).unwrap_err();
    assert!(e.message.contains("a bit fell over"), "{e}");
    on.rig.fake.heal_values();
    let z = on.unary(
        {
            on.rig.at(5);
            RELU
        },
        &x,
    );
    on.rig.fake.fail_on_device(4, 13, "another bit");
    let w = on.unary(
        {
            on.rig.at(6);
            NEG
        },
        &z,
    );
    on.stream().cut(oxitorch_engine::Reason::Barrier, on.rig.site()).unwrap();
    let e = on.stream().synchronize(on.rig.site()).unwrap_err();
    assert!(e.message.contains("another bit") && e.message.contains("script.py:"), "{e}");
    drop(w);
}

fn all() -> Vec<Vec<i32>> {
    vec![vec![3, 1, 0, 4]]
}

#[test]
fn a_collective_is_a_launch_of_its_own_in_its_place() {
    let on = square();
    let x = on.put(F32, &[4, 4], &[&["x", "y"]], &bytes(64));
    on.rig.fake.hold(); // nothing that is launched ends
    let flushes = on.rig.flushes(|| {
        let y = on.unary(NEG, &x);
        let sum = on.collective(&Collective::AllReduce(Reduction::Sum), &all(), &y).unwrap();
        let z = on.unary(NEG, &sum);
        on.rig.fake.release();
        assert_eq!(z.sizes, [4, 4]);
        on.read(&z).unwrap();
    });
    assert_eq!(flushes.into_iter().collect::<Vec<_>>(), [("collective", 2), ("read", 1)]);
    let programs = on.rig.fake.programs();
    let [before, own, after] = &programs[..] else { panic!("{programs:?}") };
    assert!(before.contains("negate") && before.contains(r#"[{"x", "y"}, {}]"#), "{before}");
    assert!(own.contains("dense<[[0, 1, 2, 3]]>") && own.contains("%arg0: tensor<1x4xf32>"), "{own}");
    assert!(!own.contains("sdy.") && after.contains("negate"), "{own}\n{after}");
    assert_eq!(on.rig.fake.calls("PJRT_LoadedExecutable_Execute"), 3);
    let which =
        "launched because of a collective: all_reduce(float32[4, 4]), number 1 of group [[3, 1, 0, 4]]\n";
    let told = on.rig.engine.explanations();
    assert_eq!(told.iter().filter(|t| t.contains(which)).count(), 2, "{told:?}");
    // The same again needs no program.
    let again = on.rig.compiled(|| {
        let sum = on.collective(&Collective::AllReduce(Reduction::Sum), &all(), &x).unwrap();
        on.read(&sum).unwrap();
    });
    assert_eq!(again.len(), 0);
}

#[test]
fn a_collective_runs_though_nobody_wants_its_result() {
    let on = square();
    let x = on.put(F32, &[4], &[&["x", "y"]], &bytes(16));
    drop(on.collective(&Collective::AllGather, &all(), &x).unwrap());
    on.stream().synchronize(on.rig.site()).unwrap();
    assert_eq!(on.rig.fake.calls("PJRT_LoadedExecutable_Execute"), 1);
    assert_eq!(on.bytes(), [4, 4, 0, 4, 4]);
}

#[test]
fn a_collective_overwrites_what_nobody_sees() {
    let on = square();
    let x = on.put(F32, &[4], &[], &bytes(16));
    // The part that each device has of it is made for the collective alone.
    let sum = on.collective(&Collective::AllReduce(Reduction::Sum), &all(), &x).unwrap();
    assert_eq!(on.bytes(), [16 + 4, 20, 0, 20, 20]);
    assert_eq!(on.rig.metrics().donations.load(Relaxed), 1);
    on.rig.at(3);
    on.rig.fake.fail_once("PJRT_LoadedExecutable_Execute", 13, "no");
    let e =
        on.read(&on.collective(&Collective::AllToAll, &[vec![3], vec![1], vec![0], vec![4]], &sum).unwrap());
    assert!(e.unwrap_err().message.contains("script.py:3"));
}

#[test]
fn collectives_that_cannot_be_are_refused_when_they_are_asked_for() {
    let on = square();
    let x = on.put(F32, &[4, 4], &[&["x", "y"]], &bytes(64));
    let (flags, three) = (on.put(DType::S32, &[8], &[], &bytes(32)), on.put(F32, &[3], &[], &bytes(12)));
    let number = on.put(F32, &[], &[], &bytes(4));
    let sum = Collective::AllReduce(Reduction::Sum);
    let refused = |what: &Collective, groups: &[Vec<i32>], x: &Tensor, words: &str| {
        let e = on.rig.at(8).line.get();
        assert_eq!(e, 8);
        let e = on.collective(what, groups, x).unwrap_err();
        assert!(e.message.contains(what.name()) && e.message.contains(words), "{words}\n{e}");
    };
    refused(&sum, &[vec![3, 1, 0], vec![4]], &x, "groups of 3 and of 1 members");
    refused(&sum, &[vec![3, 1]], &x, "2 of 4 devices are in no group");
    refused(&sum, &[vec![3, 1, 0, 2]], &x, "device 2 takes no part");
    refused(&sum, &[vec![3, 1, 0, 0]], &x, "once");
    refused(&sum, &[], &x, "without a member");
    refused(&sum, &all(), &three, "not 4 equal parts");
    refused(&sum, &all(), &number, "not 4 equal parts");
    refused(&Collective::AllReduce(Reduction::Average), &all(), &flags, "got int32");
    refused(&Collective::AllReduce(Reduction::Xor), &all(), &x, "element type");
    refused(&Collective::ReduceScatter(Reduction::Sum), &all(), &x, "4 equal parts");
    refused(&Collective::Broadcast(4), &all(), &x, "no member 4 in a group of 4");
    refused(&Collective::Permute(vec![(0, 1), (2, 1)]), &all(), &x, "once");
    // Of a device alone there is only its own group.
    let rig = &on.rig;
    let y = rig.floats();
    let e = collective(rig.stream(), rig, &sum, &[vec![0, 1]], &y).unwrap_err();
    assert!(e.message.contains("device 1 takes no part in tpu:0"), "{e}");
    let own = collective(rig.stream(), rig, &sum, &[vec![0]], &y).unwrap();
    assert_eq!(rig.read(&own).unwrap(), rig.read(&y).unwrap());
    on.stream().synchronize(on.rig.site()).unwrap();
}

#[test]
fn meshes_and_shardings_that_cannot_be_are_refused() {
    let mut on = square();
    let two = || Mesh::new(&[("x", 2)]).unwrap();
    for (devices, words) in [(&[0][..], "1 are named"), (&[0, 5], "not one of 5"), (&[1, 1], "twice")] {
        let e = on.rig.engine.add_mesh(two(), devices).unwrap_err();
        assert!(e.message.contains(words), "{e}");
    }
    let other = on.rig.engine.add_mesh(two(), &[0, 1]).unwrap();
    assert_eq!((on.at, other, on.rig.engine.device_count()), (5, 6, 5));
    let rows = on.cut(&[&["x"]]);
    let three = on.empty(F32, &[3]);
    let refused = |stream: usize, words: &str| {
        let stream = on.rig.engine.stream(stream).unwrap();
        let written = stream.write_sharded(&three.by_ref(), &rows, &bytes(12), on.rig.site(), Mode::Fused);
        let e = error(written.unwrap_err());
        assert!(e.message.contains(words), "{e}");
    };
    refused(on.at, "2 equal parts");
    refused(other, "tpu:6 is not the mesh of");
    refused(0, "tpu:0 is not the mesh of");
    assert!(on.stream().plugin_memory().unwrap().is_none());
}

#[test]
fn one_device_that_has_no_room_is_enough() {
    let on = square();
    let memory = on.rig.engine.stream(4).unwrap().memory();
    memory.set_fraction(80.0 / memory.total() as f64);
    let x = on.put(F32, &[4, 4], &[&["x"]], &bytes(64));
    let e = on.read(&on.unary(NEG, &x)).unwrap_err();
    assert!(e.message.contains("out of memory"), "{e}");
    drop(x);
    assert_eq!(on.bytes(), [0; 5]);
}

#[test]
fn a_device_that_is_not_there_counts_collectives() {
    let device = AbsentDevice {
        platform: Platform::Tpu,
        kind: "TPU v0".to_owned(),
        memory: 1 << 20,
        reads_as: 2.0,
        steps: 2,
        marked: false,
    };
    let rig = Rig::of(FakePlugin::new(), Target::Absent(device), &options());
    let x = rig.at(1).floats();
    let groups = [vec![0, 2], vec![1, 3]];
    let mean = Collective::AllReduce(Reduction::Average);
    let run = |what: &Collective| collective(rig.at(2).stream(), &rig, what, &groups, &rig.neg(&x)).unwrap();
    let (mean, all) = (run(&mean), run(&Collective::AllGather));
    assert_eq!((&mean.sizes[..], &all.sizes[..]), (&[4][..], &[8][..]));
    rig.cut(oxitorch_engine::Reason::Step);
    rig.engine.absent().into_iter().for_each(|device| device.stepped(1, true));
    let wide = run(&Collective::ReduceScatter(Reduction::Max));
    assert_eq!((wide.sizes, rig.bytes()), (vec![2], 16 + 16 + 32 + 8));
    let (capture, _) = rig.engine.captured(rig.site()).unwrap().unwrap();
    let told: Vec<_> = capture.exchanges.iter().map(|e| (e.step, e.collective.name(), e.number)).collect();
    assert_eq!(told, [(0, "all_reduce", 0), (0, "all_gather", 1), (1, "reduce_scatter", 2)]);
    let first = &capture.exchanges[0];
    assert_eq!((first.groups.as_slice(), first.bytes), (&groups[..], 16));
    assert_eq!(
        (first.r#type.to_string().as_str(), first.line.as_deref()),
        ("float32[4]", Some("script.py:2"))
    );
    // Its programs are not among those of one device.
    assert!(capture.programs.iter().all(|p| p.name == "neg"), "{:?}", capture.programs);
}

//! Programs and values of several devices on XLA's CPU plugin: what the fake plugin cannot compute.

use std::sync::atomic::Ordering::Relaxed;

use common::cpu_plugin::client;
use common::meshes::OnMesh;
use common::{MUL, NEG, Rig, SUM, error, options};
use oxitorch_engine::{CacheOptions, Collective, Options, Reduction, Target};
use oxitorch_hlo::DType;
use oxitorch_testkit::fake_plugin::FakePlugin;

mod common;

const MM: &str = "mm(Tensor self, Tensor mat2) -> Tensor";

/// Eight devices, two by four.
fn grid() -> OnMesh {
    grid_with(&options())
}

fn grid_with(options: &Options) -> OnMesh {
    let rig = Rig::of(FakePlugin::new(), Target::Client(client(8)), options);
    OnMesh::new(rig, &[("x", 2), ("y", 4)], &[0, 1, 2, 3, 7, 6, 5, 4])
}

fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(|i| (i % 23) as f32 - 7.0).collect()
}

#[test]
fn a_product_of_values_that_are_cut_is_the_product() {
    let on = grid();
    let (a, b) = (numbers(8 * 16), numbers(16 * 12));
    let product = |i: usize, j: usize| (0..16).map(|k| a[i * 16 + k] * b[k * 12 + j]).sum::<f32>();
    let expected: Vec<f32> = (0..8 * 12).map(|at| product(at / 12, at % 12)).collect();
    let x = on.floats(&[8, 16], &[&["x"], &["y"]], &a);
    let w = on.floats(&[16, 12], &[&["y"]], &b);
    let y = on.call(MM, &[x.arg(), w.arg()]).unwrap();
    let cut = on.reshard(&on.unary(NEG, &y), &[&["y", "x"]]);
    assert_eq!(on.read_floats(&y), expected);
    assert_eq!(on.read_floats(&cut), expected.iter().map(|v| -v).collect::<Vec<_>>());
    assert_eq!(
        on.read_floats(&cut.view(&[12], &[1], 24)),
        expected[24..36].iter().map(|v| -v).collect::<Vec<_>>()
    );
    // On each device: parts of both factors, a copy of the product, and an eighth.
    assert_eq!(on.bytes(), [4 * (8 * 16 / 8 + 16 * 12 / 4 + 96 + 96 / 8); 8]);
}

#[test]
fn programs_of_several_devices_come_out_of_the_cache_as_they_went_in() {
    let folder = tempfile::tempdir().unwrap();
    let cache = CacheOptions { disk: Some(folder.path().to_owned()), ..CacheOptions::default() };
    let options = Options { cache, ..options() };
    let run = || {
        let on = grid_with(&options);
        let x = on.floats(&[8, 4], &[&["y", "x"]], &numbers(32));
        let y = on.reshard(&on.unary(NEG, &x), &[&["x"], &["y"]]);
        let all = [vec![0, 1, 2, 3, 7, 6, 5, 4]];
        let sum = on.collective(&Collective::AllReduce(Reduction::Sum), &all, &x).unwrap();
        let values = (on.read_floats(&y), on.read_floats(&sum));
        (values, on.rig.engine.cache().disk_hits.load(Relaxed))
    };
    let (first, found) = run();
    assert_eq!(found, 0);
    assert_eq!(run(), (first, 2));
}

#[test]
fn a_loop_goes_on_in_the_memory_that_it_has() {
    let on = grid();
    let mut x = on.floats(&[16, 4], &[&["x", "y"]], &numbers(64));
    let mut expected = numbers(64);
    for _ in 0..5 {
        let squared = on.call(MUL, &[x.arg(), x.arg()]).unwrap();
        x = on.reshard(&on.add(&x, &on.unary(NEG, &squared)), &[&["x", "y"]]);
        expected.iter_mut().for_each(|v| *v -= *v * *v);
        expected.iter_mut().for_each(|v| *v = v.clamp(-1e30, 1e30));
        drop(squared);
        assert_eq!(on.bytes(), [32; 8]);
    }
    let total = on.call(SUM, &[x.arg(), oxitorch_engine::ArgRef::None]).unwrap();
    assert_eq!(on.read_floats(&total).len(), 1);
}

/// What each member has, of what each had, in groups.
type Reference = fn(&[Vec<f32>]) -> Vec<Vec<f32>>;

fn reduced(parts: &[Vec<f32>], f: fn(f32, f32) -> f32) -> Vec<f32> {
    let zip = |a: Vec<f32>, b: &Vec<f32>| a.into_iter().zip(b).map(|(a, b)| f(a, *b)).collect();
    parts[1..].iter().fold(parts[0].clone(), zip)
}

fn each(parts: &[Vec<f32>], value: Vec<f32>) -> Vec<Vec<f32>> {
    vec![value; parts.len()]
}

#[test]
fn collectives_give_each_device_what_they_say() {
    let on = grid();
    let cases: &[(Collective, Reference)] = &[
        (Collective::AllReduce(Reduction::Sum), |p| each(p, reduced(p, |a, b| a + b))),
        (Collective::AllReduce(Reduction::Average), |p| {
            each(p, reduced(p, |a, b| a + b).into_iter().map(|v| v / p.len() as f32).collect())
        }),
        (Collective::AllReduce(Reduction::Product), |p| each(p, reduced(p, |a, b| a * b))),
        (Collective::AllReduce(Reduction::Min), |p| each(p, reduced(p, f32::min))),
        (Collective::AllReduce(Reduction::Max), |p| each(p, reduced(p, f32::max))),
        (Collective::AllGather, |p| each(p, p.concat())),
        (Collective::ReduceScatter(Reduction::Sum), |p| {
            let sum = reduced(p, |a, b| a + b);
            sum.chunks(sum.len() / p.len()).map(<[f32]>::to_vec).collect()
        }),
        (Collective::AllToAll, |p| {
            let n = p[0].len() / p.len();
            (0..p.len()).map(|to| p.iter().flat_map(|from| from[to * n..][..n].to_vec()).collect()).collect()
        }),
        (Collective::Permute(vec![(0, 1), (1, 0)]), |p| {
            let mut out = vec![vec![0.0; p[0].len()]; p.len()];
            (out[0], out[1]) = (p[1].clone(), p[0].clone());
            out
        }),
        (Collective::Broadcast(1), |p| each(p, p[1].clone())),
    ];
    // Of all, of halves, and of devices that lie apart; by ids, in the order of the mesh.
    let (mesh, rows) = ([0, 1, 2, 3, 7, 6, 5, 4], 8);
    let groupings = [
        vec![mesh.to_vec()],
        vec![vec![0, 1, 2, 3], vec![7, 6, 5, 4]],
        vec![vec![0, 7], vec![6, 1], vec![2, 5], vec![4, 3]],
    ];
    let values = numbers(8 * rows * 3);
    let own: Vec<Vec<f32>> = values.chunks(rows * 3).map(<[f32]>::to_vec).collect();
    let place = |id: &i32| mesh.iter().position(|m| m == id).unwrap();
    for (what, reference) in cases {
        for groups in &groupings {
            let mut expected = vec![Vec::new(); 8];
            for group in groups {
                let parts: Vec<Vec<f32>> = group.iter().map(|id| own[place(id)].clone()).collect();
                group.iter().zip(reference(&parts)).for_each(|(id, part)| expected[place(id)] = part);
            }
            let x = on.floats(&[8 * rows as i64, 3], &[&["x", "y"]], &values);
            let y = on.collective(what, groups, &x).unwrap();
            assert_eq!(on.read_floats(&y), expected.concat(), "{what:?} {groups:?}");
            let local = (expected[0].len() + rows * 3) as u64 * 4;
            assert_eq!(on.bytes(), [local; 8], "{what:?} {groups:?}");
        }
    }
}

#[test]
fn moving_collectives_change_no_bit_and_bits_are_reduced() {
    let on = grid();
    let all = [vec![0, 1, 2, 3, 7, 6, 5, 4]];
    // NaNs with something in them, and a negative zero.
    let words: Vec<u32> = (0..8).map(|i| [0x7fc0_1234 + i, 0x8000_0000][i as usize % 2]).collect();
    let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
    let x = on.put(DType::F32, &[8], &[], &bytes);
    let gathered = on.collective(&Collective::AllGather, &all, &x).unwrap();
    assert_eq!(on.read(&gathered).unwrap(), bytes.repeat(8));
    let sent = on.collective(&Collective::Broadcast(4), &all, &x).unwrap();
    assert_eq!(on.read(&sent).unwrap(), bytes[16..20].repeat(8));

    let bits = on.put(DType::U8, &[8], &[], &[1, 2, 4, 8, 16, 32, 64, 129]);
    let part = Collective::ReduceScatter(Reduction::Xor);
    let wide = on.put(DType::U8, &[64], &[], &[1, 2, 4, 8, 16, 32, 64, 129].repeat(8));
    assert_eq!(on.read(&on.collective(&part, &all, &wide).unwrap()).unwrap(), [0; 8]);
    let reduce = |r| on.read(&on.collective(&Collective::AllReduce(r), &all, &bits).unwrap()).unwrap();
    assert_eq!(
        (reduce(Reduction::Or), reduce(Reduction::Xor), reduce(Reduction::And)),
        (vec![255; 8], vec![254; 8], vec![0; 8])
    );
}

#[test]
fn every_dtype_is_summed_and_moved() {
    let on = grid();
    let all = [vec![0, 1, 2, 3, 7, 6, 5, 4]];
    for dtype in DType::all() {
        let zeros = vec![0; 8 * dtype.size_bytes()];
        let x = on.put(dtype, &[8], &[&["x", "y"]], &zeros);
        for what in [Collective::AllReduce(Reduction::Sum), Collective::AllToAll, Collective::Broadcast(0)] {
            let y = match what {
                Collective::AllToAll => on.put(dtype, &[64], &[], &zeros.repeat(8)),
                _ => x.clone(),
            };
            let y = on.collective(&what, &all, &y).unwrap();
            assert_eq!(on.read(&y).map_err(|e| format!("{dtype}: {e}")).unwrap(), vec![0; y.bytes()]);
        }
    }
}

#[test]
fn a_collective_waits_for_what_it_takes_and_others_for_it() {
    let on = grid();
    let all = [vec![0, 1, 2, 3, 7, 6, 5, 4]];
    let mut x = on.floats(&[8, 4], &[&["x", "y"]], &numbers(32));
    for _ in 0..20 {
        let sum = on.collective(&Collective::AllReduce(Reduction::Average), &all, &x).unwrap();
        x = on.unary(NEG, &sum);
    }
    let column = |c: usize| (0..8).map(|r| numbers(32)[r * 4 + c]).sum::<f32>() / 8.0;
    let mean: Vec<f32> = (0..4).map(column).collect();
    assert_eq!(on.read_floats(&x), mean.repeat(8));
    // Devices go on alone meanwhile.
    let mut alone = on.rig.floats();
    for _ in 0..20 {
        alone = on.rig.neg(&alone);
        let sum = on.collective(&Collective::AllReduce(Reduction::Max), &all, &x).unwrap();
        drop(sum);
    }
    on.rig.read(&alone).unwrap();
    on.stream().synchronize(on.rig.site()).unwrap();
    let e = on.stream().collective(
        &Collective::AllGather,
        &[vec![0, 1]],
        &x.by_ref(),
        on.rig.site(),
        oxitorch_engine::Mode::Fused,
    );
    assert!(error(e.unwrap_err()).message.contains("in no group"));
}

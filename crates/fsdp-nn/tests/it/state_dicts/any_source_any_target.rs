//! Any source of state into any target: the elements that arrive are the truth.

use candle_core::{DType, Device, Tensor};
use fsdp_comm::ProcessGroup;
use fsdp_nn::state::{
    LiveTarget, MissingState, StatePrefixes, live_model_state_dict, live_optim_state_dict,
};
use fsdp_nn::{NnError, Optimizer, ShardingStrategy};
use fsdp_state::engine::{DictSource, DictTarget};
use fsdp_state::{LoadOptions, StateDict, StateError, StateValue, load_state};

use crate::state_dicts::common::*;

/// How ranks bring a dict.
#[derive(Debug, Clone, Copy)]
enum From {
    /// Each its boxes, as another layout has cut them.
    Sharded,
    /// Each all of it.
    WholeOnEveryRank,
    /// Rank 0 alone.
    WholeOnRank0,
}

/// Where it goes.
#[derive(Debug, Clone, Copy)]
enum To {
    /// Into the live tensors.
    LiveInPlace,
    /// Into the live tensors, once all is there.
    LiveStaged,
    /// Whole, into fresh tensors.
    FreshWhole,
    /// Into fresh tensors, cut as the live ones.
    FreshSharded,
}

/// One dict of a model and its optimizer.
fn both(model: StateDict, optim: StateDict) -> StateDict {
    let mut state = StateDict::new();
    state.insert("model", model);
    state.insert("optim", optim);
    state
}

fn live(model: &Model, optimizer: &Optimizer) -> StateDict {
    let optim = live_optim_state_dict(&[optimizer], MissingState::Omit).unwrap();
    both(live_model_state_dict(model.parameters()).unwrap(), optim)
}

/// A trained run of a layout.
fn trained(
    group: &ProcessGroup,
    spec: &Spec,
    layout: Layout,
    dtype: DType,
    seed: u64,
) -> (Model, Optimizer) {
    let model = model_of(group, spec, layout, dtype, seed);
    let mut optimizer = optimizer(model.parameters(), spec, &adam(), true);
    train(&model, &mut [&mut optimizer], 0..seed as usize);
    // State of a shape of its own, and under a key that is no parameter's.
    let own = |from: f32| {
        Tensor::arange(from, from + 6.0, &Device::Cpu)
            .unwrap()
            .reshape((2, 3, 1))
            .unwrap()
    };
    let mut local = optimizer.state_dict().unwrap();
    for part in ["state", "state_of_empty_pieces"] {
        let Some(StateValue::Dict(states)) = local.get_mut(part) else {
            continue;
        };
        for key in states.keys().map(str::to_owned).collect::<Vec<_>>() {
            let Some(StateValue::Dict(entries)) = states.get_mut(&key) else {
                panic!("`{key}` is a dict")
            };
            entries.insert("own", own(seed as f32));
        }
    }
    let local = edit(
        &local,
        &["state", "mine"],
        Some(own(seed as f32 / 2.0).into()),
    );
    optimizer.load_state_dict(&local).unwrap();
    (model, optimizer)
}

fn source<'a>(
    group: &ProcessGroup,
    from: From,
    sharded: &'a StateDict,
    whole: &'a StateDict,
) -> DictSource<'a> {
    match from {
        From::Sharded => DictSource::on_every_rank(sharded).unwrap(),
        From::WholeOnEveryRank => DictSource::on_every_rank(whole).unwrap(),
        From::WholeOnRank0 => {
            let whole = Some(whole).filter(|_| group.rank() == 0);
            DictSource::on_root::<StateError>(group, "test", 0, Ok(whole)).unwrap()
        }
    }
}

/// Loads in one way, and returns whole what has arrived.
fn arrived(
    group: &ProcessGroup,
    spec: &Spec,
    to: (To, Layout),
    dtype: DType,
    source: &mut DictSource<'_>,
) -> StateDict {
    let (to, layout) = to;
    // Another run, which has stepped more often.
    let (model, mut optimizer) = trained(group, spec, layout, dtype, 3);
    let before = live(&model, &optimizer);
    let report = match to {
        To::LiveInPlace | To::LiveStaged => {
            let key = |key: &str| Some(vec![key.to_owned()]);
            let prefixes = StatePrefixes {
                model: key("model"),
                optim: key("optim"),
            };
            let mut target =
                LiveTarget::new(model.parameters(), vec![&mut optimizer], prefixes).unwrap();
            let options = LoadOptions {
                staged: matches!(to, To::LiveStaged),
                ..LoadOptions::default()
            };
            load_state::<_, _, NnError>("test", group, source, &mut target, &options).unwrap()
        }
        To::FreshWhole | To::FreshSharded => {
            let whole = whole(group, &before);
            let template = if matches!(to, To::FreshWhole) {
                &whole
            } else {
                &before
            };
            let untouched = template.copy().unwrap();
            let mut target = DictTarget::new(template, None).unwrap();
            let options = LoadOptions::default();
            let report =
                load_state::<_, _, StateError>("test", group, source, &mut target, &options)
                    .unwrap();
            let fresh = target.into_state();
            assert_same(template, &untouched, "the template");
            assert!(report.is_clean(), "{report:?}");
            return self::whole(group, &fresh);
        }
    };
    assert!(report.is_clean(), "{report:?}");
    let after = live(&model, &optimizer);
    // Views that were taken before see the new values: they went into the memory that was there.
    assert_same(
        after.dict("model").unwrap(),
        before.dict("model").unwrap(),
        "live memory",
    );
    whole(group, &after)
}

#[test]
fn what_arrives_is_the_truth_from_any_source_in_any_target() {
    let mut spec = composite();
    spec.ties = vec![("tied", "p")];
    let layout = |world, strategy, use_orig_params| Layout {
        world,
        strategy,
        use_orig_params,
    };
    let layouts = [
        full_shard(3, true),
        full_shard(3, false),
        layout(2, ShardingStrategy::NoShard, true),
        layout(4, ShardingStrategy::HybridShard, true),
        layout(4, ShardingStrategy::HybridShard, false),
    ];
    for dtype in [DType::F32, DType::BF16, DType::F64] {
        let alone = ranks(1, |group| {
            let (model, optimizer) = trained(&group, &spec, PLAIN, dtype, 2);
            whole(&group, &live(&model, &optimizer)).copy().unwrap()
        });
        let truth = &alone[0];
        for to_layout in layouts {
            // The sharded dict is of other boxes than the target's.
            let from_layout = full_shard(to_layout.world, !to_layout.use_orig_params);
            ranks(to_layout.world, |group| {
                let (model, optimizer) = trained(&group, &spec, from_layout, dtype, 2);
                let sharded = live(&model, &optimizer);
                assert_same(
                    &sorted(whole(&group, &sharded)),
                    &sorted(truth.clone()),
                    "the source",
                );
                for from in [From::Sharded, From::WholeOnEveryRank, From::WholeOnRank0] {
                    for to in [
                        To::LiveInPlace,
                        To::LiveStaged,
                        To::FreshWhole,
                        To::FreshSharded,
                    ] {
                        let mut source = source(&group, from, &sharded, truth);
                        let found = arrived(&group, &spec, (to, to_layout), dtype, &mut source);
                        let what = format!("{from:?}, {to:?}, {to_layout:?}, {dtype:?}");
                        assert_same(&sorted(found), &sorted(truth.clone()), &what);
                    }
                }
            });
        }
    }
}

/// The same with the names in groups sorted: their order is that of the units of a layout.
fn sorted(state: StateDict) -> StateDict {
    both(
        state.dict("model").unwrap().clone(),
        sorted_params(state.dict("optim").unwrap()),
    )
}

/// Here, `step` is a number; in the checkpoint it is a dict, so that there is no place for what
/// lies in it.
#[test]
fn a_value_inside_a_plain_one_is_refused_before_anything_changes() {
    ranks(1, |group| {
        let weights = |model: &Model| {
            whole(&group, &live_model_state_dict(model.parameters()).unwrap())
                .copy()
                .unwrap()
        };
        let (model, _) = trained(&group, &nested(), PLAIN, DType::F32, 2);
        let (other, _) = trained(&group, &nested(), PLAIN, DType::F32, 3);
        let before = weights(&model);
        let mut saved = StateDict::new();
        saved.insert("model", weights(&other));
        saved.insert(
            "step",
            [("count", 5i64.into())].into_iter().collect::<StateDict>(),
        );
        let mut values: StateDict = [("step", 1i64.into())].into_iter().collect();
        let prefixes = StatePrefixes {
            model: Some(vec!["model".to_owned()]),
            optim: None,
        };
        let mut target = LiveTarget::new(model.parameters(), Vec::new(), prefixes)
            .unwrap()
            .with_values(&mut values);
        let mut source = DictSource::on_every_rank(&saved).unwrap();
        let options = LoadOptions {
            strict: false,
            ..LoadOptions::default()
        };
        let error = load_state::<_, _, NnError>("test", &group, &mut source, &mut target, &options)
            .unwrap_err();
        drop(target);
        assert!(error.to_string().contains("step.count"), "{error}");
        assert_same(&weights(&model), &before, "the model");
        assert_eq!(
            values.plain_at(&["step"]).and_then(|step| step.as_int()),
            Some(1)
        );
    });
}

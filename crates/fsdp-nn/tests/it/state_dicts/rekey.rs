//! Names and ids.

use candle_core::DType;
use fsdp_nn::torch::{
    OptimLoadOptions, OptimStateKeyType, consume_prefix_in_state_dict_if_present, optim_state_dict,
    optim_state_dict_to_load, rekey_optim_state_dict,
};
use fsdp_state::{StateDict, StateValue};

use crate::state_dicts::common::*;

/// The plain optimizer's own state dict, by ids, and the names that these mean.
fn plain(spec: &Spec, groups: bool) -> (StateDict, Vec<String>) {
    ranks(1, |group| {
        let model = model(&group, spec, PLAIN);
        let mut optimizer = optimizer(model.parameters(), spec, &adam(), groups);
        train(&model, &mut [&mut optimizer], 0..2);
        (
            optimizer.state_dict().unwrap(),
            optimizer.fqns().map(str::to_owned).collect(),
        )
    })
    .remove(0)
}

#[test]
fn ids_to_names_and_back_is_the_identity() {
    for (name, spec) in models() {
        for groups in [false, true] {
            let (by_ids, names) = plain(&spec, groups);
            let before = by_ids.clone();
            let by_names =
                rekey_optim_state_dict(&by_ids, OptimStateKeyType::ParamName, &names).unwrap();
            let expected = reference(&spec, &adam(), groups, DType::F32, 2).1;
            assert_same(&by_names, &expected, name);
            let back =
                rekey_optim_state_dict(&by_names, OptimStateKeyType::ParamId, &names).unwrap();
            assert_same(&back, &by_ids, name);
            assert_same(&by_ids, &before, "the caller's dict");
            let same = rekey_optim_state_dict(&by_ids, OptimStateKeyType::ParamId, &names).unwrap();
            assert_same(&same, &by_ids, "already of that kind");
        }
    }
}

/// An unsharded optimizer's dict by ids into a sharded model, and back into the unsharded
/// optimizer.
#[test]
fn a_plain_dict_by_ids_goes_into_a_sharded_model_and_back() {
    let spec = nested();
    let (by_ids, names) = plain(&spec, false);
    for use_orig_params in [true, false] {
        let back = ranks(3, |group| {
            let model = model(&group, &spec, full_shard(3, use_orig_params));
            let parameters = model.parameters();
            let mut optimizer = optimizer(parameters, &spec, &adam(), false);
            let named =
                rekey_optim_state_dict(&by_ids, OptimStateKeyType::ParamName, &names).unwrap();
            let options = OptimLoadOptions {
                load_directly: true,
                ..Default::default()
            };
            optim_state_dict_to_load(&named, parameters, &mut optimizer, &options).unwrap();
            let full = optim_state_dict(None, parameters, &optimizer).unwrap();
            rekey_optim_state_dict(&full, OptimStateKeyType::ParamId, &names).unwrap()
        });
        assert_same(&back[1], &by_ids, "through a sharded model");
        ranks(1, |group| {
            let model = model(&group, &spec, PLAIN);
            let mut optimizer = optimizer(model.parameters(), &spec, &adam(), false);
            optimizer.load_state_dict(&back[0]).unwrap();
            assert_same(&optimizer.state_dict().unwrap(), &by_ids, "loaded");
        });
    }
}

#[test]
fn mixed_or_unknown_keys_are_refused() {
    let (by_ids, names) = plain(&dummy(), false);
    let mixed = edit(
        &by_ids,
        &["state", "net1.weight"],
        Some(StateDict::new().into()),
    );
    for key_type in [OptimStateKeyType::ParamName, OptimStateKeyType::ParamId] {
        let message = text(rekey_optim_state_dict(&mixed, key_type, &names));
        assert!(
            message.starts_with("invalid parameter keys: ["),
            "{message}"
        );
        let without_groups = edit(&mixed, &["param_groups"], None);
        let message = text(rekey_optim_state_dict(&without_groups, key_type, &names));
        assert!(
            message.starts_with("invalid parameter keys: ["),
            "{message}"
        );
    }
    let message = text(rekey_optim_state_dict(
        &by_ids,
        OptimStateKeyType::ParamName,
        &names[..3],
    ));
    assert!(
        message.contains("which is none of the 3 parameters here"),
        "{message}"
    );
    let message = text(rekey_optim_state_dict(
        &StateDict::new(),
        OptimStateKeyType::ParamName,
        &names,
    ));
    assert!(
        message.contains("must have the keys \"state\""),
        "{message}"
    );
}

/// Mutation guard: torch takes an empty state for already rekeyed, and leaves the groups as they
/// are.
#[test]
fn groups_are_rekeyed_without_any_state() {
    let (by_ids, names) = plain(&dummy(), false);
    let stateless = edit(&by_ids, &["state"], Some(StateDict::new().into()));
    let named = rekey_optim_state_dict(&stateless, OptimStateKeyType::ParamName, &names).unwrap();
    let Some(StateValue::List(groups)) = named.get("param_groups") else {
        panic!("groups")
    };
    let params = groups[0]
        .as_dict()
        .unwrap()
        .get("params")
        .unwrap()
        .as_plain()
        .unwrap()
        .clone();
    assert_eq!(
        params,
        fsdp_layout::PlainValue::List(names.iter().map(|name| name.as_str().into()).collect())
    );
}

#[test]
fn two_keys_that_would_become_one_are_refused() {
    let (by_ids, mut names) = plain(&mini7(), false);
    names[1] = names[0].clone();
    let error = rekey_optim_state_dict(&by_ids, OptimStateKeyType::ParamName, &names).unwrap_err();
    assert!(error.to_string().contains(&names[0]), "{error}");
    let state: StateDict = [("module.a", 1.0.into()), ("a", 2.0.into())]
        .into_iter()
        .collect();
    let error = consume_prefix_in_state_dict_if_present(&state, "module.").unwrap_err();
    assert!(error.to_string().contains("`a`"), "{error}");
}

/// The steps of parameters of which a rank has no element are under a key of their own.
#[test]
fn the_state_of_empty_pieces_is_rekeyed_with_the_rest() {
    let spec = dummy();
    ranks(3, |group| {
        let model = model(&group, &spec, full_shard(3, true));
        let mut optimizer = optimizer(model.parameters(), &spec, &adam(), false);
        train(&model, &mut [&mut optimizer], 0..2);
        let names: Vec<String> = optimizer.fqns().map(str::to_owned).collect();
        let (by_ids, by_names) = (
            optimizer.state_dict().unwrap(),
            optimizer.named_state_dict().unwrap(),
        );
        let has_empty_pieces = by_ids
            .dict("state_of_empty_pieces")
            .is_some_and(|pieces| !pieces.is_empty());
        assert!(has_empty_pieces || group.rank() > 0);
        let rekeyed = |state, key_type| rekey_optim_state_dict(state, key_type, &names).unwrap();
        assert_same(
            &rekeyed(&by_ids, OptimStateKeyType::ParamName),
            &by_names,
            "to names",
        );
        assert_same(
            &rekeyed(&by_names, OptimStateKeyType::ParamId),
            &by_ids,
            "to ids",
        );
    });
}

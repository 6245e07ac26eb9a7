//! The settings hold in their scope and nowhere else.

use fsdp_nn::torch::{StateDictConfig, StateDictSettings, StateDictType};
use fsdp_nn::{NnError, StateDictError};

use crate::state_dicts::common::{composite, full_shard, model, ranks};

#[test]
fn a_config_of_another_class_is_refused() {
    let local = StateDictConfig::Local {
        offload_to_cpu: false,
    };
    let error = StateDictSettings::new(StateDictType::Full, Some(local), None).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("expected state_dict_config of type"),
        "{error}"
    );
    assert!(matches!(
        error,
        NnError::StateDict(StateDictError::ConfigType {
            expected: "FullStateDictConfig",
            found: "LocalStateDictConfig",
            ..
        })
    ));
    let optim = StateDictConfig::Local {
        offload_to_cpu: false,
    };
    let error = StateDictSettings::new(StateDictType::Sharded, None, Some(optim)).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("expected optim_state_dict_config of type"),
        "{error}"
    );
}

#[test]
fn defaults_are_torchs() {
    let default = StateDictSettings::default();
    assert_eq!(default.state_dict_type(), StateDictType::Full);
    assert!(
        !default.state_dict_config().offload_to_cpu() && !default.state_dict_config().rank0_only()
    );
    for (state_dict_type, offload) in [
        (StateDictType::Full, true),
        (StateDictType::Sharded, true),
        (StateDictType::Local, false),
    ] {
        let settings = StateDictSettings::from(state_dict_type);
        let config = settings.optim_state_dict_config();
        assert_eq!(config.offload_to_cpu(), offload, "{state_dict_type:?}");
        assert!(!config.rank0_only());
    }
}

#[test]
fn the_settings_before_come_back_on_every_exit_path() {
    ranks(1, |group| {
        let model = model(&group, &composite(), full_shard(1, true));
        let parameters = model.parameters();
        let config = StateDictConfig::Full {
            offload_to_cpu: true,
            rank0_only: true,
        };
        let outer = StateDictSettings::new(StateDictType::Full, Some(config), None).unwrap();
        assert_eq!(
            parameters.set_state_dict_type(outer),
            StateDictSettings::default()
        );
        let sharded = StateDictSettings::from(StateDictType::Sharded);
        parameters.state_dict_type(sharded, || {
            assert_eq!(parameters.get_state_dict_type(), sharded);
            let local = StateDictSettings::from(StateDictType::Local);
            parameters.state_dict_type(local, || {
                assert_eq!(parameters.get_state_dict_type(), local)
            });
            assert_eq!(parameters.get_state_dict_type(), sharded);
        });
        assert_eq!(parameters.get_state_dict_type(), outer);
        let failed: Result<(), NnError> = parameters.state_dict_type(sharded, || {
            Err(NnError::UnknownParameter { fqn: "x".into() })
        });
        assert!(failed.is_err());
        assert_eq!(parameters.get_state_dict_type(), outer);
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            parameters.state_dict_type(sharded, || panic!("inside the scope"));
        }));
        assert!(panicked.is_err());
        assert_eq!(parameters.get_state_dict_type(), outer);
    });
}

#[test]
fn configs_of_the_right_class_are_taken() {
    let model = StateDictConfig::Sharded {
        offload_to_cpu: true,
    };
    assert!(
        StateDictSettings::new(StateDictType::Sharded, Some(model), None)
            .unwrap()
            .state_dict_config()
            .offload_to_cpu()
    );
    let optim = StateDictConfig::Full {
        offload_to_cpu: false,
        rank0_only: true,
    };
    let settings = StateDictSettings::new(StateDictType::Full, None, Some(optim)).unwrap();
    assert!(settings.optim_state_dict_config().rank0_only());
}

//! Reading a local optimizer state dict: which of the optimizer's parameters a key means.

use fsdp_state::{StateDict, StateValue};

use super::rekey::key_type_of;
use super::{OptimStateError, OptimStateKey, OptimStateKeyType};
use crate::Result;
use crate::optim_state::{SavedGroup, read_param_groups};
use crate::optimizer::Optimizer;

/// A local optimizer state dict, taken apart. Tensors are shared with it.
#[derive(Debug)]
pub(crate) struct LocalStateDict<'a> {
    /// State by local parameter, in the dict's order: the key in the dict, the position in the optimizer, the state.
    pub(crate) params: Vec<(&'a str, usize, &'a StateDict)>,
    /// State under other keys.
    pub(crate) user_state: Vec<(&'a str, &'a StateValue)>,
    /// The groups with the names of the model's parameters; `None` if the dict has none.
    pub(crate) groups: Option<Vec<SavedGroup>>,
}

impl<'a> LocalStateDict<'a> {
    /// Takes apart what [`Optimizer::state_dict`] or [`Optimizer::named_state_dict`] gave.
    pub(crate) fn read(optimizer: &Optimizer, state: &'a StateDict) -> Result<Self> {
        let states = state.dict("state").ok_or_else(|| OptimStateError::MissingKey { key: "state".to_owned() })?;
        let locals = optimizer.locals();
        let mut groups = read_param_groups(state)?;
        let of_groups = groups.iter().filter_map(|group| group.key_type);
        // Without groups to tell, numbers are ids and all else is names.
        let by_name = match groups.is_empty() {
            false => key_type_of(&StateDict::new(), of_groups)? == Some(OptimStateKeyType::ParamName),
            true => false,
        };
        let find = |key: &str| match key.parse::<usize>() {
            Ok(id) if !by_name => (id < locals.len()).then_some(id),
            _ => locals.iter().position(|local| local.name() == key),
        };
        let mut read = LocalStateDict { params: Vec::new(), user_state: Vec::new(), groups: None };
        for (key, value) in states {
            match (find(key), value.as_dict()) {
                (Some(index), Some(entries)) => read.params.push((key, index, entries)),
                (Some(_), None) => {
                    let expected = format!("the state of parameter `{key}` is a {}", value.kind());
                    return Err(OptimStateError::InvalidKeys { keys: vec![key.clone()], expected }.into());
                }
                (None, _) if !by_name && key.parse::<usize>().is_ok() => {
                    return Err(OptimStateError::UnknownState { key: key.clone(), count: locals.len() }.into());
                }
                (None, _) => read.user_state.push((key, value)),
            }
        }
        if state.contains_key("param_groups") {
            for (index, group) in groups.iter_mut().enumerate() {
                let mut names = Vec::new();
                for key in &group.params {
                    let Some(local) = find(key) else {
                        return Err(OptimStateError::UnknownParam { index, key: key.clone() }.into());
                    };
                    names.extend(locals[local].fqns());
                }
                group.params = names;
                group.key_type = Some(OptimStateKeyType::ParamName);
            }
            read.groups = Some(groups);
        }
        Ok(read)
    }
}

/// The key of a local parameter.
pub(crate) fn key_of(optimizer: &Optimizer, local: usize) -> OptimStateKey {
    OptimStateKey { unflat_param_names: optimizer.locals()[local].fqns(), is_fsdp_managed: true }
}

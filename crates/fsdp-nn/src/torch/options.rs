//! Options of `get_state_dict` and `set_state_dict`.

use fsdp_state::KeepOn;

use crate::error::{NnError, Result, StateDictError};
use crate::model::ShardedParameters;

/// torch's `StateDictOptions`; the same on every rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateDictOptions {
    /// `true` if tensors are whole instead of sharded. A load takes either, and each rank its part.
    pub full_state_dict: bool,
    /// `true` if values go to the CPU. A load takes them from any device. With `full_state_dict`
    /// only rank 0 gets them, as in torch, and the others an empty dict, unless `keep_on` says
    /// otherwise.
    pub cpu_offload: bool,
    /// The ranks that get a full state dict; the others get an empty one. `None`: all, or rank 0
    /// with `cpu_offload`. Needs `full_state_dict`.
    pub keep_on: Option<KeepOn>,
    /// `true` if frozen parameters are left out of the model state dict, and may be missing on
    /// load.
    pub ignore_frozen_params: bool,
    /// The submodules (by FQN) whose parameters and buffers are in the model state dict; all if
    /// empty. A load of such a dict needs `strict` off. A name that the model does not have is an
    /// error.
    pub submodules: Vec<String>,
    /// `true` if names keep the submodule's FQN in front. Without it only one submodule may be
    /// named.
    pub keep_submodule_prefixes: bool,
    /// `true` if names that differ between a state dict and the model are an error on load. Shapes
    /// always are; state of parameters that no optimizer holds never is.
    pub strict: bool,
    /// `true` if the dicts of rank 0 are loaded; the other ranks may pass empty dicts. Needs
    /// `full_state_dict`.
    pub broadcast_from_rank0: bool,
    /// `true` if the optimizers' dict is flat: `state.<fqn>.<name>` and
    /// `param_groups.<fqn>.<hyperparameter>` are its keys, instead of nested dicts. A load knows
    /// either. State under keys that are no parameter's has no place there, and is an error.
    pub flatten_optimizer_state_dict: bool,
    /// The names that differ between the state dict and the model, as pairs: an FQN or prefix of
    /// FQNs in the model, and the same in the dict.
    pub fqn_renames: Vec<(String, String)>,
    /// `true` if sharded values are views of the live model and optimizer, as torch's are. Such
    /// views need no copy, but the next step changes them; for a save that is no harm. By default
    /// values are copied, and they are with `full_state_dict` or `cpu_offload`. If such views are
    /// loaded into the model that they belong to, nothing is moved, whatever this option is.
    pub share_storage: bool,
}

impl Default for StateDictOptions {
    fn default() -> Self {
        StateDictOptions {
            full_state_dict: false,
            cpu_offload: false,
            keep_on: None,
            ignore_frozen_params: false,
            submodules: Vec::new(),
            keep_submodule_prefixes: true,
            strict: true,
            broadcast_from_rank0: false,
            flatten_optimizer_state_dict: false,
            fqn_renames: Vec::new(),
            share_storage: false,
        }
    }
}

impl StateDictOptions {
    /// Refuses options that contradict each other, and submodules that the model does not have.
    pub(super) fn check(&self, parameters: &ShardedParameters) -> Result<()> {
        if self.broadcast_from_rank0 && !self.full_state_dict {
            return Err(NnError::options(
                "full_state_dict must be true when broadcast_from_rank0 is true",
            ));
        }
        if self.keep_on.is_some() && !self.full_state_dict {
            return Err(NnError::options(
                "full_state_dict must be true when keep_on is given: every rank has its own part \
                 of a sharded state dict",
            ));
        }
        if !self.keep_submodule_prefixes && self.submodules.len() != 1 {
            return Err(NnError::options(
                "without keep_submodule_prefixes exactly one submodule must be named",
            ));
        }
        // A submodule is there if some parameter or buffer lies in it.
        let mut names: Vec<&str> = parameters.names().collect();
        names.extend(parameters.buffers().keys().map(String::as_str));
        // A name that is misspelt would give an empty state dict.
        for module in &self.submodules {
            if !names.iter().any(|name| name_below(name, module).is_some()) {
                let module = module.clone();
                return Err(StateDictError::UnknownSubmodule { module }.into());
            }
        }
        Ok(())
    }

    /// Returns the options beside `strict` that decide what is loaded, and where: all ranks must
    /// have the same ones.
    pub(super) fn arguments_of_load(&self) -> String {
        let Self {
            ignore_frozen_params,
            submodules,
            keep_submodule_prefixes,
            fqn_renames,
            ..
        } = self;
        format!(
            "ignore_frozen_params {ignore_frozen_params}, submodules {submodules:?}, \
             keep_submodule_prefixes {keep_submodule_prefixes}, fqn_renames {fqn_renames:?}"
        )
    }

    /// Returns the ranks that keep a full state dict.
    pub(super) fn ranks_to_keep(&self) -> KeepOn {
        match &self.keep_on {
            Some(keep_on) => keep_on.clone(),
            None if self.cpu_offload => KeepOn::Ranks(vec![0]),
            None => KeepOn::All,
        }
    }

    /// Returns `true` if the caller gets views of the live values, and not copies of them.
    pub(super) const fn returns_views(&self) -> bool {
        self.share_storage && !self.full_state_dict && !self.cpu_offload
    }

    /// Returns the name in the state dict of something in the model; `None` if the options leave it
    /// out.
    pub(super) fn name_in_dict(&self, fqn: &str) -> Option<String> {
        let mut name = fqn;
        if !self.submodules.is_empty() {
            let (_, name_in_module) = self
                .submodules
                .iter()
                .find_map(|module| Some((module, name_below(fqn, module)?)))?;
            if !self.keep_submodule_prefixes {
                name = name_in_module;
            }
        }
        Some(self.rename_for_dict(name))
    }

    /// Returns the name in the state dict of a parameter of the optimizers, which submodules do not
    /// narrow.
    pub(super) fn rename_for_dict(&self, fqn: &str) -> String {
        let mut renames = self.fqn_renames.iter();
        let renamed = renames.find_map(|(model, dict)| replace_prefix(fqn, model, dict));
        renamed.unwrap_or_else(|| fqn.to_owned())
    }

    /// Returns the name in the model of a parameter in the optimizers' state dict.
    pub(super) fn rename_for_model(&self, name: &str) -> String {
        let mut renames = self.fqn_renames.iter();
        let renamed = renames.find_map(|(model, dict)| replace_prefix(name, dict, model));
        renamed.unwrap_or_else(|| name.to_owned())
    }

    /// Returns the name in the model of something in a state dict.
    #[must_use]
    pub fn name_in_model(&self, name: &str) -> String {
        let fqn = self.rename_for_model(name);
        match self.submodules.as_slice() {
            [module] if !self.keep_submodule_prefixes => format!("{module}.{fqn}"),
            _ => fqn,
        }
    }
}

/// Returns the part of a name that lies below a module: `b.weight` of `a.b.weight` below `a`; all
/// of it if it is the module's.
fn name_below<'a>(name: &'a str, module: &str) -> Option<&'a str> {
    match name.strip_prefix(module)? {
        "" => Some(name),
        rest => rest.strip_prefix('.'),
    }
}

/// Returns the name with the leading name `old_prefix` replaced by `new_prefix`; `None` if it does
/// not begin with that.
fn replace_prefix(name: &str, old_prefix: &str, new_prefix: &str) -> Option<String> {
    match name.strip_prefix(old_prefix)? {
        "" => Some(new_prefix.to_owned()),
        suffix if old_prefix.is_empty() => Some(format!("{new_prefix}.{suffix}")),
        suffix => suffix.strip_prefix('.').map(|suffix| {
            if new_prefix.is_empty() {
                suffix.to_owned()
            } else {
                format!("{new_prefix}.{suffix}")
            }
        }),
    }
}

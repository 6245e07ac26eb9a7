//! From the model's names to those in a state dict, and back.

use crate::StateDictOptions;

/// The name in the state dict of something in the model; `None` if the options leave it out.
pub(crate) fn to_dict(fqn: &str, options: &StateDictOptions) -> Option<String> {
    let mut name = fqn;
    if !options.submodules.is_empty() {
        let (_, rest) = options.submodules.iter().find_map(|module| Some((module, below(fqn, module)?)))?;
        if !options.keep_submodule_prefixes {
            name = rest;
        }
    }
    let renamed = options.fqn_renames.iter().find_map(|(model, dict)| replace(name, model, dict));
    Some(renamed.unwrap_or_else(|| name.to_owned()))
}

/// The name in the model of something in a state dict.
pub(crate) fn to_model(name: &str, options: &StateDictOptions) -> String {
    let renamed = options.fqn_renames.iter().find_map(|(model, dict)| replace(name, dict, model));
    let fqn = renamed.unwrap_or_else(|| name.to_owned());
    match options.submodules.as_slice() {
        [module] if !options.keep_submodule_prefixes => format!("{module}.{fqn}"),
        _ => fqn,
    }
}

/// What of a name lies below a module: `b.weight` of `a.b.weight` below `a`; all of the name if it is the module's.
fn below<'a>(name: &'a str, module: &str) -> Option<&'a str> {
    match name.strip_prefix(module)? {
        "" => Some(name),
        rest => rest.strip_prefix('.'),
    }
}

/// The name with a leading name replaced by another.
fn replace(name: &str, from: &str, to: &str) -> Option<String> {
    match name.strip_prefix(from)? {
        "" => Some(to.to_owned()),
        rest if from.is_empty() => Some(format!("{to}.{rest}")),
        rest => rest.strip_prefix('.').map(|rest| if to.is_empty() { rest.to_owned() } else { format!("{to}.{rest}") }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_go_there_and_back() {
        let options = StateDictOptions {
            fqn_renames: vec![("encoder".into(), "model.enc".into()), ("head".into(), String::new())],
            ..StateDictOptions::default()
        };
        for (fqn, name) in [
            ("encoder.0.weight", "model.enc.0.weight"),
            ("encoder", "model.enc"),
            ("encoders.weight", "encoders.weight"),
            ("head.weight", "weight"),
        ] {
            assert_eq!(to_dict(fqn, &options).as_deref(), Some(name));
        }
        assert_eq!(to_model("model.enc.0.weight", &options), "encoder.0.weight");
        assert_eq!(to_model("encoders.weight", &StateDictOptions::default()), "encoders.weight");
    }

    #[test]
    fn submodules_are_cut_out() {
        let mut options = StateDictOptions { submodules: vec!["a.b".into()], ..StateDictOptions::default() };
        assert_eq!(to_dict("a.b.weight", &options).as_deref(), Some("a.b.weight"));
        assert_eq!(to_dict("a.bc.weight", &options), None);
        options.keep_submodule_prefixes = false;
        assert_eq!(to_dict("a.b.weight", &options).as_deref(), Some("weight"));
        assert_eq!(to_model("weight", &options), "a.b.weight");
    }
}

//! Units by name pattern, for models whose code has no [`Scope::unit`](crate::Scope::unit): torch's
//! `auto_wrap_policy`.

/// Returns the name of the unit that a parameter belongs to by a pattern: its leading components
/// that match the pattern's. `None` if they do not match, or nothing is left of the name below
/// them.
pub(crate) fn unit_of<'a>(pattern: &str, fqn: &'a str) -> Option<&'a str> {
    let mut end = 0;
    let mut components = fqn.split('.');
    for (index, wanted) in pattern.split('.').enumerate() {
        let component = components.next()?;
        if wanted != "*" && wanted != component {
            return None;
        }
        end += component.len() + usize::from(index > 0);
    }
    components.next().map(|_| &fqn[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_names_units_by_whole_components() {
        for (pattern, fqn, expected) in [
            (
                "model.layers.*",
                "model.layers.12.mlp.weight",
                Some("model.layers.12"),
            ),
            ("layers.*", "model.layers.12.mlp.weight", None),
            (
                "*.layers.*",
                "model.layers.12.mlp.weight",
                Some("model.layers.12"),
            ),
            ("model.layers.*", "model.layers.12", None),
            ("model.layers.*", "model.layers2.1.weight", None),
            ("head", "head.weight", Some("head")),
            ("head", "heads.weight", None),
            ("head", "head", None),
            ("*", "weight", None),
            ("", "weight", None),
        ] {
            assert_eq!(unit_of(pattern, fqn), expected, "{pattern} of {fqn}");
        }
    }
}

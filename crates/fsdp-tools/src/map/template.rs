//! Key templates with placeholders: `layers.{i}.weight`.

use std::collections::BTreeMap;

/// The texts that stand for the names in a template.
pub(super) type Bindings = BTreeMap<String, String>;

/// A key with places.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Template(Vec<TemplatePart>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum TemplatePart {
    /// This text itself.
    Text(String),
    /// A place for a part without dots.
    Name(String),
    /// A place for any text.
    Rest(String),
}

impl Template {
    /// Reads a template.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let mut parts = Vec::new();
        let mut rest = text;
        while let Some(at) = rest.find('{') {
            if at > 0 {
                parts.push(TemplatePart::Text(rest[..at].to_owned()));
            }
            let end = rest[at..]
                .find('}')
                .ok_or_else(|| format!("`{text}` has no end of `{{`"))?;
            // `{name*}` is a place for any text.
            let inside = &rest[at + 1..at + end];
            let name = inside.strip_suffix('*').unwrap_or(inside);
            let is_rest = name.len() < inside.len();
            if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') {
                return Err(format!("`{name}` is no name"));
            }
            if matches!(
                parts.last(),
                Some(TemplatePart::Name(_) | TemplatePart::Rest(_))
            ) {
                return Err(format!("`{text}` has two places side by side"));
            }
            parts.push(if is_rest {
                TemplatePart::Rest(name.to_owned())
            } else {
                TemplatePart::Name(name.to_owned())
            });
            rest = &rest[at + end + 1..];
        }
        if rest.contains('}') {
            return Err(format!("`{text}` has no start of `}}`"));
        }
        if !rest.is_empty() {
            parts.push(TemplatePart::Text(rest.to_owned()));
        }
        if parts.is_empty() {
            return Err("a key is empty".to_owned());
        }
        Ok(Template(parts))
    }

    /// Returns the names of the places.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().filter_map(|part| match part {
            TemplatePart::Name(name) | TemplatePart::Rest(name) => Some(name.as_str()),
            TemplatePart::Text(_) => None,
        })
    }

    /// Matches a whole key. A name that occurs twice must be the same text twice.
    pub(super) fn matches(&self, key: &str) -> Option<Bindings> {
        let mut bindings = Bindings::new();
        let mut rest = key;
        for (at, part) in self.0.iter().enumerate() {
            let (name, is_rest) = match part {
                TemplatePart::Text(text) => {
                    rest = rest.strip_prefix(text.as_str())?;
                    continue;
                }
                TemplatePart::Name(name) => (name, false),
                TemplatePart::Rest(name) => (name, true),
            };
            // A place goes up to the text after it: the last such text for the rest of a key, as
            // none follows it elsewhere.
            let end = match self.0.get(at + 1) {
                Some(TemplatePart::Text(next)) if is_rest => rest.rfind(next.as_str())?,
                Some(TemplatePart::Text(next)) => rest.find(next.as_str())?,
                _ => rest.len(),
            };
            let text = &rest[..end];
            if text.is_empty() || (!is_rest && text.contains('.')) {
                return None;
            }
            let before = bindings.insert(name.clone(), text.to_owned());
            if before.is_some_and(|before| before != text) {
                return None;
            }
            rest = &rest[end..];
        }
        rest.is_empty().then_some(bindings)
    }

    /// Makes the key for these texts; `None` if one is missing.
    pub(super) fn fill(&self, bindings: &Bindings) -> Option<String> {
        let mut key = String::new();
        for part in &self.0 {
            match part {
                TemplatePart::Text(text) => key.push_str(text),
                TemplatePart::Name(name) | TemplatePart::Rest(name) => {
                    key.push_str(bindings.get(name)?)
                }
            }
        }
        Some(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_match_parts_of_keys() {
        let template = Template::parse("layers.{i}.attention.{w}.weight").unwrap();
        let bindings = template.matches("layers.12.attention.wq.weight").unwrap();
        assert_eq!(
            (bindings["i"].as_str(), bindings["w"].as_str()),
            ("12", "wq")
        );
        assert_eq!(
            template.fill(&bindings).unwrap(),
            "layers.12.attention.wq.weight"
        );
        for other in [
            "layers.12.attention.weight",
            "layers.1.2.attention.w.weight",
            "x.layers.1.attention.w.weight",
        ] {
            assert_eq!(template.matches(other), None, "{other}");
        }
        let rest = Template::parse("model.{rest*}.weight").unwrap();
        assert_eq!(
            rest.matches("model.a.weight.b.weight").unwrap()["rest"],
            "a.weight.b"
        );
        let twice = Template::parse("{a}.{a}").unwrap();
        assert!(twice.matches("x.x").is_some() && twice.matches("x.y").is_none());
        for bad in ["", "a.{", "a.}", "a.{}", "{a}{b}", "{a b}"] {
            assert!(Template::parse(bad).is_err(), "{bad}");
        }
    }
}

//! Pictures as SVG: shapes, escaped text, and the area of a chart.

use crate::markup::{STYLE, escape};

/// A picture, drawn one element after the other. The `style` of an element is SVG: attributes such
/// as `class="soft"`.
#[derive(Debug, Default)]
pub(crate) struct Picture {
    elements: String,
}

/// A rectangle: a part of a picture, or the area of a chart between its axes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Area {
    pub(crate) x: f64,
    pub(crate) y: f64,
    pub(crate) width: f64,
    pub(crate) height: f64,
}

impl Area {
    /// Returns the position of a value that lies this far (0 to 1) along the horizontal axis.
    pub(crate) fn x_at(&self, fraction: f64) -> f64 {
        self.x + fraction * self.width
    }

    /// Returns the position of a value that lies this far (0 to 1) up the vertical axis.
    pub(crate) fn y_at(&self, fraction: f64) -> f64 {
        // In SVG, y grows downwards.
        self.y + (1.0 - fraction) * self.height
    }
}

impl Picture {
    /// Draws a rectangle. Whoever points at it sees the `tooltip`, if that is not empty.
    pub(crate) fn rectangle(&mut self, area: Area, style: &str, tooltip: &str) {
        let lengths = [
            ("x", area.x),
            ("y", area.y),
            ("width", area.width),
            ("height", area.height),
        ];
        self.shape("rect", &lengths, style, &title_element(tooltip));
    }

    /// Draws a line across the whole width of an area.
    pub(crate) fn line_across(&mut self, area: &Area, y: f64, style: &str) {
        let lengths = [("x1", area.x), ("x2", area.x_at(1.0)), ("y1", y), ("y2", y)];
        self.shape("line", &lengths, style, "");
    }

    /// Draws a line through points, as a `polyline`, or what it encloses, as a `polygon`.
    pub(crate) fn curve(
        &mut self,
        name: &str,
        points: impl IntoIterator<Item = (f64, f64)>,
        style: &str,
    ) {
        let points: Vec<String> = points
            .into_iter()
            .map(|(x, y)| format!("{},{}", round_length(x), round_length(y)))
            .collect();
        let style = format!("points=\"{}\" {style}", points.join(" "));
        self.shape(name, &[], &style, "");
    }

    /// Writes text at a point, with a tooltip if that is not empty.
    pub(crate) fn text(&mut self, (x, y): (f64, f64), style: &str, text: &str, tooltip: &str) {
        let content = format!("{}{}", escape(text), title_element(tooltip));
        self.shape("text", &[("x", x), ("y", y)], style, &content);
    }

    /// Draws a shape of any kind. Its content is SVG.
    pub(crate) fn shape(
        &mut self,
        name: &str,
        lengths: &[(&str, f64)],
        style: &str,
        content: &str,
    ) {
        let lengths: String = lengths
            .iter()
            .map(|(attribute, length)| format!(" {attribute}=\"{}\"", round_length(*length)))
            .collect();
        // Elements without a style have no attributes but their place.
        let gap = if style.is_empty() { "" } else { " " };
        self.elements.push_str(&format!(
            "<{name}{lengths}{gap}{style}>{content}</{name}>\n"
        ));
    }

    /// Returns the picture as a part of a page, which defines the styles.
    pub(crate) fn for_page(self, heading: &str, width: f64, height: f64) -> String {
        let attributes = format!("width=\"{width}\" height=\"{height}\" role=\"img\"");
        self.document(
            width,
            height,
            &attributes,
            &format!("{}\n", title_element(heading)),
        )
    }

    /// Returns the picture as a file of its own, in the styles of pages.
    pub(crate) fn into_file(mut self, heading: &str, width: f64, height: f64) -> String {
        // A file of its own has nobody to define the styles, so it brings them, and a background.
        self.elements = format!(
            "<style>\n{STYLE}</style>\n<rect class=\"paper\" width=\"{width}\" height=\"{height}\"/>\n{}",
            self.elements
        );
        self.for_page(heading, width, height)
    }

    /// Returns the picture as SVG with these attributes. `first_element` comes before all elements.
    pub(crate) fn document(
        self,
        width: f64,
        height: f64,
        attributes: &str,
        first_element: &str,
    ) -> String {
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" {attributes}>{first_element}{}</svg>\n",
            self.elements
        )
    }
}

/// Returns the element that browsers show as a tooltip; nothing for an empty text.
fn title_element(text: &str) -> String {
    if text.is_empty() {
        return String::new();
    }
    format!("<title>{}</title>", escape(text))
}

/// Rounds a length to a tenth of a pixel, which nobody can see.
fn round_length(length: f64) -> f64 {
    (length * 10.0).round() / 10.0
}

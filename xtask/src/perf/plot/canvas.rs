//! Draws a picture: axes, lines or bars, and the legend beside them, where it hides nothing.

use anyhow::{Context as _, anyhow};
use plotters::coord::Shift;
use plotters::element::DashedPathElement;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::axis::{Axis, Scale};
use super::look::{Fill, Look, Looks, Marker};

/// Size of a picture.
const WIDTH: i32 = 960;
const SIZE: (u32, u32) = (960, 540);

/// Text of axes and legend, and of the title; neither changes with the size.
const FONT: (&str, u32) = ("sans-serif", 16);
const TITLE: (&str, u32) = ("sans-serif", 22);

/// Space around everything.
const MARGIN: i32 = 14;
/// Space for the title and what is below it.
const TOP: i32 = 66;
/// Space for labels below and beside the axes, and for what an axis is about.
const BELOW: i32 = 52;
const BESIDE: i32 = 88;

/// Space between the plot and the legend, and between a sample of the legend and its name.
const GAP: i32 = 14;
/// Width of a sample of the legend.
const SAMPLE: i32 = 36;
/// Height of a line of the legend.
const ROW: i32 = 24;
/// No letter of a name is wider on average.
const LETTER: i32 = 8;

/// Dashes and what is between them.
const DASH: i32 = 9;
const PAUSE: i32 = 5;

/// How much of a group's place its bars take, and how much of its share each bar.
const GROUP_SHARE: f64 = 0.8;
const BAR_SHARE: f64 = 0.9;

/// A line: whose it is, and its points.
#[derive(Debug)]
pub(super) struct Series {
    /// A peer.
    pub(super) peer: String,
    /// Across and up.
    pub(super) points: Vec<(f64, f64)>,
}

/// A bar: whose it is, how high, and how far its rounds went.
#[derive(Debug, PartialEq)]
pub(super) struct Bar {
    /// A peer.
    pub(super) peer: String,
    /// The median.
    pub(super) value: f64,
    /// Of all rounds.
    pub(super) least: f64,
    /// Of all rounds.
    pub(super) most: f64,
}

/// Bars of one group: what it is called, and one of each peer that has a value.
#[derive(Debug)]
pub(super) struct Group {
    /// Below the bars.
    pub(super) name: String,
    /// In the order of the legend.
    pub(super) bars: Vec<Bar>,
}

/// What is within the axes.
#[derive(Debug)]
pub(super) enum Content {
    /// Lines, and the scale of what they show.
    Lines(Vec<Series>, Scale),
    /// Bars, whose length is what they show: always from zero.
    Bars(Vec<Group>),
}

/// See the module.
#[derive(Debug)]
pub(super) struct Picture {
    /// On top.
    pub(super) title: String,
    /// Below the title, smaller.
    pub(super) note: String,
    /// What goes across.
    pub(super) across: String,
    /// What goes up, with its unit.
    pub(super) up: String,
    /// Lines or bars.
    pub(super) content: Content,
    /// Who is not in it, and why: below the legend.
    pub(super) absent: Vec<String>,
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Plot<'a> = ChartContext<'a, SVGBackend<'a>, Cartesian2d<Axis, Axis>>;
type Place = (i32, i32);

impl Picture {
    /// The file.
    ///
    /// # Errors
    /// It cannot be drawn.
    pub(super) fn to_svg(&self, looks: &Looks) -> anyhow::Result<String> {
        let mut svg = String::new();
        {
            let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
            self.paint(&area, looks)?;
            area.present().map_err(failed)?;
        }
        self.described(&svg)
    }

    /// With words for those who do not see it.
    fn described(&self, svg: &str) -> anyhow::Result<String> {
        let (head, body) = svg.split_once(">\n").context("drawing: no picture")?;
        let (title, note) = (escaped(&self.title), escaped(&self.note));
        let axes = escaped(&format!("{} against {}", self.up, self.across));
        let names = escaped(&self.peers().join(", "));
        Ok(format!(
            "{head} role=\"img\">\n<title>{title}</title>\n<desc>{axes}, of {names}. {note}</desc>\n{body}"
        ))
    }

    /// Everyone in it, in the order of the legend.
    fn peers(&self) -> Vec<&str> {
        let all: Vec<&str> = match &self.content {
            Content::Lines(lines, _) => lines.iter().map(|line| line.peer.as_str()).collect(),
            Content::Bars(groups) => {
                let bars = groups.iter().flat_map(|group| &group.bars);
                bars.map(|bar| bar.peer.as_str()).collect()
            }
        };
        let mut peers = Vec::new();
        for peer in all {
            if !peers.contains(&peer) {
                peers.push(peer);
            }
        }
        peers
    }

    /// Across and up, with room for all that is in it.
    fn axes(&self) -> (Axis, Axis) {
        match &self.content {
            Content::Lines(lines, scale) => {
                let points = || lines.iter().flat_map(|line| &line.points);
                (
                    Axis::over(Scale::Linear, points().map(|(across, _)| *across)),
                    Axis::over(*scale, points().map(|(_, up)| *up)),
                )
            }
            Content::Bars(groups) => {
                let names: Vec<&str> = groups.iter().map(|group| group.name.as_str()).collect();
                let bars = groups.iter().flat_map(|group| &group.bars);
                (
                    Axis::of_names(&names),
                    Axis::over(Scale::Linear, bars.map(|bar| bar.value.max(bar.most))),
                )
            }
        }
    }

    /// Where the plot ends, so that the longest name of the legend fits beside it.
    fn right(&self) -> i32 {
        let absent = self.absent.iter().map(|text| width(text));
        let names = self.peers().into_iter().map(width);
        let widest = names.chain(absent).max().unwrap_or(0);
        let right = WIDTH - MARGIN - widest - GAP - SAMPLE - GAP;
        right.max(WIDTH / 2)
    }

    fn paint(&self, area: &Area<'_>, looks: &Looks) -> anyhow::Result<()> {
        area.fill(&WHITE).map_err(failed)?;
        let (title, note) = (TITLE.into_text_style(area), FONT.into_text_style(area));
        area.draw_text(&self.title, &title, (MARGIN, MARGIN))
            .map_err(failed)?;
        area.draw_text(&self.note, &note, (MARGIN, MARGIN + 26))
            .map_err(failed)?;
        let plot = self.frame(area)?;
        match &self.content {
            Content::Lines(lines, _) => {
                // The thickest above the others.
                let mut lines: Vec<&Series> = lines.iter().collect();
                lines.sort_by_key(|line| looks.of(&line.peer).width);
                for line in lines {
                    let points = line.points.iter().map(|point| plot.backend_coord(point));
                    let points: Vec<Place> = points.collect();
                    draw_line(area, looks.of(&line.peer), &points)?;
                    for point in points {
                        draw_marker(area, looks.of(&line.peer), point)?;
                    }
                }
            }
            Content::Bars(groups) => self.draw_bars(area, &plot, groups, looks)?,
        }
        self.draw_legend(area, looks)
    }

    /// The axes with their lines and labels.
    fn frame<'a>(&self, area: &Area<'a>) -> anyhow::Result<Plot<'a>> {
        let (across, up) = self.axes();
        let mut plot = ChartBuilder::on(area)
            .margin(MARGIN)
            .margin_top(TOP)
            .margin_right(WIDTH - self.right())
            .x_label_area_size(BELOW)
            .y_label_area_size(BESIDE)
            .build_cartesian_2d(across, up)
            .map_err(failed)?;
        {
            let mut mesh = plot.configure_mesh();
            mesh.label_style(FONT)
                .axis_desc_style(FONT)
                .x_desc(self.across.as_str())
                .y_desc(self.up.as_str());
            if let Content::Bars(_) = &self.content {
                mesh.disable_x_mesh();
            }
            mesh.draw().map_err(failed)?;
        }
        Ok(plot)
    }

    fn draw_bars(
        &self,
        area: &Area<'_>,
        plot: &Plot<'_>,
        groups: &[Group],
        looks: &Looks,
    ) -> anyhow::Result<()> {
        let peers = self.peers();
        let share = GROUP_SHARE / peers.len().max(1) as f64;
        let width = share * BAR_SHARE;
        for (at, group) in groups.iter().enumerate() {
            let begin = at as f64 + (1.0 - GROUP_SHARE) / 2.0;
            for (number, peer) in peers.iter().enumerate() {
                let Some(bar) = group.bars.iter().find(|bar| bar.peer == *peer) else {
                    continue;
                };
                let left = begin + share * number as f64;
                let corners = [(left, 0.0), (left + width, bar.value)];
                let corners = corners.map(|corner| plot.backend_coord(&corner));
                draw_box(area, looks.of(peer), corners)?;
                if bar.least < bar.most {
                    let middle = left + width / 2.0;
                    let ends = [(middle, bar.least), (middle, bar.most)];
                    let ends = ends.map(|end| plot.backend_coord(&end));
                    area.draw(&PathElement::new(ends.to_vec(), ShapeStyle::from(BLACK)))
                        .map_err(failed)?;
                }
            }
        }
        Ok(())
    }

    fn draw_legend(&self, area: &Area<'_>, looks: &Looks) -> anyhow::Result<()> {
        let left = self.right() + GAP;
        let beside = left + SAMPLE + GAP;
        let text = FONT.into_text_style(area);
        let text = text.pos(Pos::new(HPos::Left, VPos::Center));
        let mut y = TOP + ROW / 2;
        for peer in self.peers() {
            let look = looks.of(peer);
            match &self.content {
                Content::Lines(..) => {
                    draw_line(area, look, &[(left, y), (left + SAMPLE, y)])?;
                    draw_marker(area, look, (left + SAMPLE / 2, y))?;
                }
                Content::Bars(_) => draw_box(area, look, [(left, y - 7), (left + SAMPLE, y + 7)])?,
            }
            area.draw_text(peer, &text, (beside, y)).map_err(failed)?;
            y += ROW;
        }
        for absent in &self.absent {
            area.draw_text(absent, &text, (beside, y)).map_err(failed)?;
            y += ROW;
        }
        Ok(())
    }
}

fn draw_line(area: &Area<'_>, look: Look, points: &[Place]) -> anyhow::Result<()> {
    let style = ShapeStyle::from(look.color).stroke_width(look.width);
    let points = points.to_vec();
    match look.fill {
        Fill::Solid => area.draw(&PathElement::new(points, style)),
        Fill::Hollow => area.draw(&DashedPathElement::new(points, DASH, PAUSE, style)),
    }
    .map_err(failed)
}

fn draw_marker(area: &Area<'_>, look: Look, (x, y): Place) -> anyhow::Result<()> {
    let r = look.radius;
    let inside = match look.fill {
        Fill::Solid => look.color,
        Fill::Hollow => WHITE,
    };
    let inside = ShapeStyle::from(inside).filled();
    let outline = ShapeStyle::from(look.color).stroke_width(2);
    let corners = match look.marker {
        Marker::Circle => {
            area.draw(&Circle::new((x, y), r, inside)).map_err(failed)?;
            return area.draw(&Circle::new((x, y), r, outline)).map_err(failed);
        }
        Marker::Square => vec![
            (x - r, y - r),
            (x + r, y - r),
            (x + r, y + r),
            (x - r, y + r),
        ],
        Marker::Diamond => vec![(x, y - r), (x + r, y), (x, y + r), (x - r, y)],
        Marker::Up => vec![(x, y - r), (x + r, y + r), (x - r, y + r)],
        Marker::Down => vec![(x, y + r), (x + r, y - r), (x - r, y - r)],
    };
    let closed: Vec<Place> = corners.iter().chain(corners.first()).copied().collect();
    area.draw(&Polygon::new(corners, inside)).map_err(failed)?;
    area.draw(&PathElement::new(closed, outline))
        .map_err(failed)
}

fn draw_box(area: &Area<'_>, look: Look, corners: [Place; 2]) -> anyhow::Result<()> {
    let inside = match look.fill {
        Fill::Solid => look.color.to_rgba(),
        Fill::Hollow => look.color.mix(0.25),
    };
    area.draw(&Rectangle::new(corners, ShapeStyle::from(inside).filled()))
        .map_err(failed)?;
    area.draw(&Rectangle::new(corners, ShapeStyle::from(look.color)))
        .map_err(failed)
}

/// Of a text in the legend, at most.
fn width(text: &str) -> i32 {
    text.chars().map(|_letter| LETTER).sum()
}

/// Text that ends no element: names of peers come from files of users.
fn escaped(text: &str) -> String {
    let text = text.replace('&', "&amp;");
    text.replace('<', "&lt;").replace('>', "&gt;")
}

fn failed(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("drawing: {error}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_lines(peers: &[&str]) -> Picture {
        let series = |peer: &&str| Series {
            peer: (*peer).to_owned(),
            points: vec![(1000.0, 100.0), (4000.0, 5e6)],
        };
        Picture {
            title: "Latency of an echo".to_owned(),
            note: "Medians of 5 rounds; lower is better.".to_owned(),
            across: "echoes in a second".to_owned(),
            up: "latency".to_owned(),
            content: Content::Lines(peers.iter().map(series).collect(), Scale::Logarithmic),
            absent: vec!["rathole: failed".to_owned()],
        }
    }

    fn of_bars(bars: Vec<Bar>) -> Picture {
        let name = "down x8".to_owned();
        Picture {
            content: Content::Bars(vec![Group { name, bars }]),
            ..of_lines(&[])
        }
    }

    fn bar(peer: &str, value: f64, most: f64) -> Bar {
        Bar {
            peer: peer.to_owned(),
            value,
            least: value / 2.0,
            most,
        }
    }

    /// Where a text of a picture is, if it is in it.
    fn place_of(svg: &str, text: &str) -> Option<Place> {
        let (before, _) = svg.split_once(&format!(">\n{text}\n</text>"))?;
        let (_, element) = before.rsplit_once("<text x=\"")?;
        let (x, rest) = element.split_once("\" y=\"")?;
        let (y, _) = rest.split_once('"')?;
        Some((x.parse().ok()?, y.parse().ok()?))
    }

    /// Where it begins.
    fn x_of(svg: &str, text: &str) -> Option<i32> {
        place_of(svg, text).map(|(x, _)| x)
    }

    #[test]
    fn legend_stands_beside_the_plot_and_within_the_picture() {
        let few = ["adit"];
        let many = ["adit", "haproxy-plaintext", "relay-io-uring-splice"];
        for peers in [&few[..], &many[..]] {
            let picture = of_lines(peers);
            let svg = picture.to_svg(&Looks::new(peers)).unwrap();
            for text in peers.iter().copied().chain(["rathole: failed"]) {
                let left = x_of(&svg, text).unwrap();
                assert!(left > picture.right() + SAMPLE, "{text} at {left}");
                assert!(left + width(text) <= WIDTH, "{text} at {left}");
            }
        }
    }

    #[test]
    fn legend_of_many_peers_ends_above_the_edge() {
        let (_, height) = SIZE;
        let names: Vec<String> = (0..18).map(|number| format!("peer-{number}")).collect();
        let peers: Vec<&str> = names.iter().map(String::as_str).collect();
        let svg = of_lines(&peers).to_svg(&Looks::new(&peers)).unwrap();
        let (_, last_peer) = place_of(&svg, "peer-17").unwrap();
        let (_, last) = place_of(&svg, "rathole: failed").unwrap();
        assert!(last > last_peer, "{last} and {last_peer}");
        // Lines of the legend are written around their middle.
        assert!(last + ROW / 2 <= i32::try_from(height).unwrap(), "{last}");
    }

    #[test]
    fn axes_have_round_labels_with_units() {
        let svg = of_lines(&["adit"]).to_svg(&Looks::new(&["adit"])).unwrap();
        for label in ["0", "4,000", "100 us", "1 ms", "1 s"] {
            assert!(x_of(&svg, label).is_some(), "{label} in {svg}");
        }
    }

    #[test]
    fn picture_says_what_it_shows_to_those_who_do_not_see_it() {
        let mut picture = of_lines(&["adit", "mine & yours"]);
        picture.title = "Latency <p99>".to_owned();
        let svg = picture.to_svg(&Looks::new(&["adit"])).unwrap();
        assert!(svg.starts_with("<svg "), "{svg}");
        assert!(svg.contains(" role=\"img\">\n<title>Latency &lt;p99&gt;</title>\n<desc>latency against echoes in a second, of adit, mine &amp; yours."));
    }

    #[test]
    fn bars_begin_at_zero_and_have_room_for_the_best_round() {
        let picture = of_bars(vec![bar("adit", 9.0, 21.0), bar("upstream", 1.0, 2.0)]);
        let (_, up) = picture.axes();
        assert_eq!(up.range(), 0.0..25.0);
        assert_eq!(picture.peers(), ["adit", "upstream"]);
        let svg = picture.to_svg(&Looks::new(&["adit", "upstream"])).unwrap();
        assert!(x_of(&svg, "down x8").unwrap() < picture.right());
    }

    #[test]
    fn peers_that_share_a_colour_differ_in_dashes() {
        let peers = ["haproxy", "haproxy-plaintext"];
        let looks = Looks::new(&peers);
        let lines = |peer: &str| {
            let svg = of_lines(&[peer]).to_svg(&looks).unwrap();
            svg.matches("<polyline").count()
        };
        assert!(lines("haproxy-plaintext") > lines("haproxy"));
    }
}

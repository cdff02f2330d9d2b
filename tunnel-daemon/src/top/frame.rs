//! The lines of a table of tunnels, for widths from 80 columns on.

use std::time::Duration;

use super::model::{Row, Sample, sort};
use crate::status::model::Role;
use crate::status::tables::name;
use crate::status::text::{age, bytes, clean, clean_middle, micros};
use adit_config::TopSort;

/// Least width of a terminal.
pub(super) const WIDTH_MIN: usize = 80;
/// Columns taken by all fields except tenant, peer and destination, including the spaces between.
const FIXED: usize = 48;
/// Divisor of the remaining columns that gives the peer's width, and the one with what the peer has proved beside its id.
const PEER_SHARE: usize = 3;
const PROVED_SHARE: usize = 2;
/// Width of the tenant column.
const TENANT: usize = 8;
/// Terminals of this width show the tenant column; narrower ones only if it decides the order.
const WIDTH_TENANT: usize = 100;

/// A sample in display order.
pub(super) struct Picture {
    sample: Sample,
    order: TopSort,
    reverse: bool,
}

impl Picture {
    pub(super) fn new(mut sample: Sample, order: TopSort, reverse: bool) -> Self {
        sort(&mut sample.rows, order, reverse);
        Self {
            sample,
            order,
            reverse,
        }
    }

    pub(super) fn sample(&self) -> &Sample {
        &self.sample
    }

    pub(super) fn into_sample(self) -> Sample {
        self.sample
    }

    /// Number of rows.
    pub(super) fn rows(&self) -> usize {
        self.sample.rows.len()
    }

    /// Title, column heads and all rows.
    pub(super) fn all(&self, width: usize) -> Vec<String> {
        let mut lines = vec![self.title(width), self.columns(width)];
        lines.extend(self.body(width, 0, usize::MAX));
        lines
    }

    /// Title, column heads and all rows, unshortened at any width: for pipes.
    pub(super) fn whole(&self) -> Vec<String> {
        let longest = |head: &str, text: fn(&Row) -> String| {
            let rows = self.sample.rows.iter();
            let longest = rows.map(|row| text(row).chars().count()).max();
            // A head may be followed by the mark of the sort order.
            longest.unwrap_or(0).max(head.len() + 1)
        };
        let widths = Widths {
            tenant: Some(longest("TENANT", |row| row.tunnel.tenant.clone())),
            proved: match self.has_proofs() {
                true => Proved::Column(longest("PROVED", proved)),
                false => Proved::Nothing,
            },
            peer: longest("SERVER", |row| row.tunnel.peer.clone()),
            destination: longest("DESTINATION", |row| row.tunnel.destination.clone()),
        };
        let mut lines = vec![
            self.title_of(usize::MAX, usize::MAX),
            self.columns_of(&widths),
        ];
        lines.extend(self.sample.rows.iter().map(|row| line(row, &widths)));
        lines
    }

    /// Whether a peer has proved something.
    fn has_proofs(&self) -> bool {
        let mut rows = self.sample.rows.iter();
        rows.any(|row| row.tunnel.principal.is_some())
    }

    /// The observed process, and the sums.
    pub(super) fn title(&self, width: usize) -> String {
        self.title_of(width, 20)
    }

    fn title_of(&self, width: usize, id_width: usize) -> String {
        let sum = |rate: fn(&Row) -> u64| {
            self.sample
                .rows
                .iter()
                .map(rate)
                .fold(0, u64::saturating_add)
        };
        let listed = self.sample.rows.len() as u64;
        let more = if listed < self.sample.open {
            format!(", {listed} listed")
        } else {
            String::new()
        };
        let text = format!(
            "{} {}  {} tunnels{more}  {}/s to targets  {}/s to clients",
            self.sample.role.name(),
            clean_middle(&self.sample.id, id_width),
            self.sample.open,
            bytes(sum(|row| row.to_target)),
            bytes(sum(|row| row.to_client)),
        );
        clean(&text, width)
    }

    /// The column heads; a mark shows the one that decides the order.
    pub(super) fn columns(&self, width: usize) -> String {
        self.columns_of(&self.widths(width))
    }

    fn columns_of(&self, widths: &Widths) -> String {
        let peer = match self.sample.role {
            Role::Server => "AGENT",
            Role::Agent => "SERVER",
        };
        let mark = |name: &str, order: TopSort| {
            let sign = if self.reverse { '^' } else { '*' };
            if order == self.order {
                format!("{name}{sign}")
            } else {
                name.to_owned()
            }
        };
        let rate = |name: &str| mark(name, TopSort::Rate);
        let (peer_width, destination_width) = (widths.peer, widths.destination);
        format!(
            "{}{}{:<peer_width$} {:<destination_width$} {:<8} {:>6} {:>7} {:>7} {:>6} {:>5} {:>3}",
            widths.tenant(&mark("TENANT", TopSort::Tenant)),
            widths.proved("PROVED"),
            mark(peer, TopSort::Agent),
            mark("DESTINATION", TopSort::Destination),
            "PATH",
            mark("AGE", TopSort::Age),
            rate("TGT/s"),
            rate("CLI/s"),
            mark("BYTES", TopSort::Bytes),
            mark("RTT", TopSort::Rtt),
            mark("RE", TopSort::Retransmits),
        )
    }

    /// `count` rows, starting at `from`.
    pub(super) fn body(&self, width: usize, from: usize, count: usize) -> Vec<String> {
        let widths = self.widths(width);
        let rows = self.sample.rows.iter().skip(from).take(count);
        rows.map(|row| line(row, &widths)).collect()
    }

    fn widths(&self, width: usize) -> Widths {
        let width = width.max(WIDTH_MIN);
        let has_tenant = width >= WIDTH_TENANT || self.order == TopSort::Tenant;
        let taken = if has_tenant { TENANT + 1 } else { 0 };
        let rest = width - FIXED - 2 - taken;
        let (proved, share) = match self.has_proofs() {
            true => (Proved::BesideId, PROVED_SHARE),
            false => (Proved::Nothing, PEER_SHARE),
        };
        let peer = rest / share;
        Widths {
            tenant: has_tenant.then_some(TENANT),
            proved,
            peer,
            destination: rest - peer,
        }
    }
}

/// Widths of the columns that depend on the terminal.
struct Widths {
    /// Width of the tenant column, if it is shown.
    tenant: Option<usize>,
    proved: Proved,
    peer: usize,
    destination: usize,
}

/// Where a line shows what a peer has proved.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Proved {
    Nothing,
    /// Before the peer's id, in the same column.
    BesideId,
    /// In a column of this width.
    Column(usize),
}

fn proved(row: &Row) -> String {
    name(row.tunnel.principal.as_deref())
}

impl Widths {
    /// The column of what peers have proved, and the space after it; empty if there is none.
    fn proved(&self, text: &str) -> String {
        match self.proved {
            Proved::Column(width) => format!("{:<width$} ", clean_middle(text, width)),
            Proved::Nothing | Proved::BesideId => String::new(),
        }
    }

    /// A peer in its column.
    fn peer(&self, row: &Row) -> String {
        let id = &row.tunnel.peer;
        if self.proved != Proved::BesideId {
            return clean_middle(id, self.peer);
        }
        // An id is often random: the name gets up to half of the column.
        let proved = clean_middle(&proved(row), self.peer / 2);
        let rest = self.peer.saturating_sub(proved.chars().count() + 1);
        format!("{proved} {}", clean_middle(id, rest))
    }

    /// The tenant column and the space after it; empty if it is not shown.
    fn tenant(&self, text: &str) -> String {
        self.tenant.map_or_else(String::new, |width| {
            format!("{:<width$} ", clean_middle(text, width))
        })
    }
}

fn line(row: &Row, widths: &Widths) -> String {
    let (peer_width, destination_width) = (widths.peer, widths.destination);
    let tunnel = &row.tunnel;
    let known = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    format!(
        "{}{}{:<peer_width$} {:<destination_width$} {:<8} {:>6} {:>7} {:>7} {:>6} {:>5} {:>3}",
        widths.tenant(&tunnel.tenant),
        widths.proved(&proved(row)),
        widths.peer(row),
        clean_middle(&tunnel.destination, destination_width),
        clean(&tunnel.path, 8),
        age(Duration::from_secs_f64(tunnel.age_seconds.clamp(0.0, 1e9))),
        bytes(row.to_target),
        bytes(row.to_client),
        bytes(row.bytes()),
        known(tunnel.rtt_micros.map(micros)),
        known(tunnel.retransmits.map(|count| count.min(999).to_string())),
    )
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::super::model::Sampler;
    use super::super::model::tests::{tunnel, tunnels};
    use super::*;

    fn picture(order: TopSort) -> Picture {
        let mut widest = tunnel(1, u64::MAX / 4);
        widest.tenant = "\x1b[2Ja-tenant-with-a-long-name".to_owned();
        widest.peer = "agent-with-a-long-name.example.org".to_owned();
        widest.destination = "\x1b[2J[2001:db8:1234:5678:9abc:def0:1234:5678]:65535".to_owned();
        widest.principal = Some("CN=a-proved-name-that-is-long".to_owned());
        widest.path = "raw-lane".to_owned();
        widest.age_seconds = 9_999.0 * 86_400.0;
        widest.rtt_micros = Some(999_999);
        widest.retransmits = Some(u64::MAX);
        let seen = tunnels(1, vec![widest, tunnel(2, 10), tunnel(3, 20)]);
        Picture::new(Sampler::default().take(seen, Instant::now()), order, false)
    }

    #[test]
    fn lines_fit_the_width_and_have_no_control_characters() {
        for (_, order) in TopSort::ALL {
            for width in [80, 100, 200] {
                let lines = picture(order).all(width);
                assert_eq!(lines.len(), 5);
                for line in &lines {
                    assert!(line.chars().count() <= width, "{width}: {line:?}");
                    assert!(!line.contains(char::is_control), "{line:?}");
                }
                assert_eq!(lines[1].chars().count(), width, "{:?}", lines[1]);
            }
        }
    }

    #[test]
    fn output_to_a_pipe_is_not_shortened() {
        let lines = picture(TopSort::Rate).whole();
        for part in [
            "a-tenant-with-a-long-name ",
            "agent-with-a-long-name.example.org ",
            "a-proved-name-that-is-long ",
            "[2J[2001:db8:1234:5678:9abc:def0:1234:5678]:65535 ",
        ] {
            assert!(lines.iter().any(|line| line.contains(part)), "{lines:?}");
        }
        let ends: Vec<usize> = lines[1..].iter().map(|line| line.chars().count()).collect();
        assert!(ends.iter().all(|end| *end == ends[0]), "{lines:?}");
        assert!(!lines.iter().any(|line| line.contains(char::is_control)));
    }

    #[test]
    fn what_an_agent_has_proved_is_beside_its_id() {
        let mut row = tunnel(2, 10);
        row.peer = "de9b433a-4d9c-4f1c-9a0a-2e6a2679b36c4".to_owned();
        row.principal = Some("CN=edge-1".to_owned());
        let mut nothing = tunnel(3, 20);
        nothing.principal = None;
        let seen = tunnels(1, vec![row, nothing]);
        let sample = Sampler::default().take(seen, Instant::now());
        let picture = Picture::new(sample, TopSort::Age, false);
        let lines = picture.all(WIDTH_MIN);
        assert!(lines[2].starts_with("edge-1 de9~36c4 "), "{lines:?}");
        assert!(lines[3].starts_with("- agent-1 "), "{lines:?}");
        let whole = picture.whole();
        let both = [" edge-1 ", " de9b433a-4d9c-4f1c-9a0a-2e6a2679b36c4 "];
        assert!(both.iter().all(|text| whole[2].contains(text)), "{whole:?}");
    }

    #[test]
    fn the_tenant_column_is_shown_when_it_fits_or_is_the_sort_order() {
        for (order, width, rows) in [
            (TopSort::Rate, 80, 0),
            (TopSort::Rate, 99, 0),
            (TopSort::Rate, 100, 2),
            (TopSort::Tenant, 80, 2),
        ] {
            let lines = picture(order).all(width);
            assert_eq!(lines[1].contains("TENANT"), rows > 0, "{}", lines[1]);
            // The third row's tenant has a long name.
            let told = lines.iter().filter(|line| line.starts_with("tenant-"));
            assert_eq!(told.count(), rows, "{order:?} at {width}: {lines:?}");
        }
    }

    #[test]
    fn the_sort_column_is_marked() {
        for (order, mark) in [
            (TopSort::Rate, "TGT/s*"),
            (TopSort::Bytes, "BYTES*"),
            (TopSort::Age, "AGE*"),
            (TopSort::Agent, "AGENT*"),
            (TopSort::Destination, "DESTINATION*"),
            (TopSort::Tenant, "TENANT*"),
            (TopSort::Rtt, "RTT*"),
            (TopSort::Retransmits, "RE*"),
        ] {
            let columns = picture(order).columns(WIDTH_MIN);
            assert!(columns.contains(mark), "{columns}");
        }
    }

    #[test]
    fn the_title_counts_open_and_listed_tunnels() {
        let mut seen = tunnels(1, vec![tunnel(2, 10)]);
        seen.open = 23_456;
        let sample = Sampler::default().take(seen, Instant::now());
        let title = Picture::new(sample, TopSort::Rate, false).title(WIDTH_MIN);
        assert!(title.contains("23456 tunnels, 1 listed"), "{title}");
    }
}

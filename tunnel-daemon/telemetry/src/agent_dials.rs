//! Outcomes of dials by agent: counts for status output, and series of their own for the first agents.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use adit_core::text::beginning;
use prometheus::{IntCounter, IntCounterVec};

use crate::families::Registrar;
use crate::labels::{AgentDial, Label as _};

/// The label of agents without series of their own.
const OTHER: &str = "other";
/// Length limit of an id as a label, in bytes: agents choose their ids, of up to 1,024 bytes.
const LABEL_BYTES_MAX: usize = 128;
/// Number of outcomes.
const OUTCOMES: usize = AgentDial::ALL.len();

/// How the dials of one agent ended, over all of its links.
#[derive(Default)]
pub struct AgentDials {
    counts: [AtomicU64; OUTCOMES],
    series: Option<[IntCounter; OUTCOMES]>,
}

/// Counts of one agent's dials since its first link; they end with its last link.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct AgentDialCounts {
    /// The agent answered in time: the target is open, or has refused.
    pub answered: u64,
    /// The agent answered late, or had not answered when the client gave up.
    pub slow: u64,
    /// The dial failed at the agent or on its way.
    pub failed: u64,
}

impl AgentDials {
    /// Counts a dial.
    pub fn count(&self, outcome: AgentDial) {
        let at = outcome.index();
        if let Some(count) = self.counts.get(at) {
            count.fetch_add(1, Relaxed);
        }
        if let Some(series) = self.series.as_ref().and_then(|series| series.get(at)) {
            series.inc();
        }
    }

    /// The counts so far.
    #[must_use]
    pub fn counts(&self) -> AgentDialCounts {
        let [answered, slow, failed] = self.counts.each_ref().map(|count| count.load(Relaxed));
        AgentDialCounts {
            answered,
            slow,
            failed,
        }
    }
}

impl fmt::Debug for AgentDials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.counts().fmt(f)
    }
}

/// The dials of all agents that have a link.
pub(super) struct DialsByAgent {
    family: IntCounterVec,
    agents: Mutex<Agents>,
}

#[derive(Default)]
struct Agents {
    /// By id; an entry without a link is removed later.
    linked: HashMap<Box<str>, Weak<AgentDials>>,
    /// Size of `linked` above which entries without a link are removed.
    prune_at: usize,
    /// Agents with series of their own, by label.
    labelled: Vec<(String, Weak<AgentDials>)>,
    /// Limit on `labelled`.
    labelled_max: usize,
}

/// Size of the table below which nothing is removed.
const PRUNE_MIN: usize = 64;

impl DialsByAgent {
    pub(super) fn register(families: &Registrar<'_>) -> Self {
        let name = "agent_dials_total";
        #[cfg(test)]
        crate::tests::declared::values::<AgentDial>(&format!("adit_{name}"));
        let help = "Dials by the agent that was asked and by result; agent is other for all but the first --metrics-agents agents. \
                    An agent without a link keeps its series until another agent needs the place";
        let all = Self {
            family: families.counter_vec(name, help, &["agent", "result"]),
            agents: Mutex::default(),
        };
        let _from_zero = all.series(OTHER);
        all
    }

    /// Sets the number of agents with series of their own.
    pub(super) fn set_labelled_max(&self, agents: usize) {
        self.lock().labelled_max = agents;
    }

    /// The counts of an agent, shared by all of its links.
    pub(super) fn of(&self, agent: &str) -> Arc<AgentDials> {
        let mut agents = self.lock();
        if let Some(known) = agents.linked.get(agent).and_then(Weak::upgrade) {
            return known;
        }
        if agents.linked.len() >= agents.prune_at.max(PRUNE_MIN) {
            agents.linked.retain(|_, dials| dials.strong_count() > 0);
            agents.prune_at = 2 * agents.linked.len();
        }
        let label = label(agent);
        let place = self.place(&mut agents, &label);
        let series = match place {
            Some(_) => self.series(&label),
            None => self.series(OTHER),
        };
        let dials = Arc::new(AgentDials {
            series: Some(series),
            ..AgentDials::default()
        });
        if let Some(of_place) = place.and_then(|place| agents.labelled.get_mut(place)) {
            *of_place = (label, Arc::downgrade(&dials));
        }
        agents.linked.insert(agent.into(), Arc::downgrade(&dials));
        dials
    }

    /// A place among the agents with series of their own: the one that the label has, a free one, or that of an agent without a
    /// link, whose series end.
    fn place(&self, agents: &mut Agents, label: &str) -> Option<usize> {
        let known = agents.labelled.iter().position(|(one, _)| one == label);
        if known.is_some() {
            return known;
        }
        if agents.labelled.len() < agents.labelled_max {
            agents.labelled.push((label.to_owned(), Weak::new()));
            return Some(agents.labelled.len() - 1);
        }
        let is_left = |(_, dials): &(String, Weak<AgentDials>)| dials.strong_count() == 0;
        let place = agents.labelled.iter().position(is_left)?;
        if let Some((left, _)) = agents.labelled.get(place).filter(|(left, _)| left != OTHER) {
            for outcome in AgentDial::ALL {
                // Each was made when the place was taken.
                let _removed = self.family.remove_label_values(&[left, outcome.as_str()]);
            }
        }
        Some(place)
    }

    /// The series of a label, 0 from the start.
    fn series(&self, label: &str) -> [IntCounter; OUTCOMES] {
        [AgentDial::Answered, AgentDial::Slow, AgentDial::Failed]
            .map(|outcome| self.family.with_label_values(&[label, outcome.as_str()]))
    }

    fn lock(&self) -> MutexGuard<'_, Agents> {
        // Nothing panics while this is held; if it did, the table is still consistent.
        self.agents.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An agent's id as a label: its beginning, without characters that control a terminal.
fn label(agent: &str) -> String {
    let shown = |c: char| if c.is_control() { '?' } else { c };
    beginning(agent, LABEL_BYTES_MAX)
        .chars()
        .map(shown)
        .collect()
}

#[cfg(test)]
mod tests {
    use prometheus::Registry;

    use super::*;
    use crate::exposition::Scrape;

    fn book(labelled_max: usize) -> (DialsByAgent, Scrape) {
        let registry = Registry::new();
        let dials = DialsByAgent::register(&Registrar::new(&registry, "adit_"));
        dials.set_labelled_max(labelled_max);
        (dials, Scrape::new(registry))
    }

    fn series(scrape: &Scrape) -> Vec<String> {
        let text = scrape.text();
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let counted = lines.filter_map(|line| line.strip_prefix("adit_agent_dials_total"));
        counted.map(str::to_owned).collect()
    }

    fn failed(scrape: &Scrape) -> Vec<String> {
        let mut all = series(scrape);
        all.retain(|line| line.contains("failed"));
        all
    }

    #[test]
    fn without_a_number_of_agents_all_count_as_other() {
        let (dials, scrape) = book(0);
        assert_eq!(series(&scrape).len(), OUTCOMES, "0 from the start");
        dials.of("a").count(AgentDial::Failed);
        dials.of("b").count(AgentDial::Failed);
        assert_eq!(failed(&scrape), ["{agent=\"other\",result=\"failed\"} 2"]);
    }

    /// Limit (operations): Agents with series of their own | `--metrics-agents`, by default none; at most 1,000
    #[test]
    fn the_first_agents_have_series_until_another_needs_the_place_of_one_that_left() {
        let (dials, scrape) = book(2);
        let [a, b, c] = ["a", "b", "c"].map(|agent| dials.of(agent));
        for agent in [&a, &b, &c] {
            agent.count(AgentDial::Failed);
        }
        let of =
            |agent: &str, count: u32| format!("{{agent=\"{agent}\",result=\"failed\"}} {count}");
        assert_eq!(failed(&scrape), [of("a", 1), of("b", 1), of("other", 1)]);
        let again = dials.of("a");
        again.count(AgentDial::Failed);
        assert_eq!(a.counts().failed, 2, "links of one agent share the counts");
        drop((a, again));
        assert_eq!(failed(&scrape)[0], of("a", 2), "the agent may return");
        let returned = dials.of("a");
        returned.count(AgentDial::Failed);
        assert_eq!(failed(&scrape)[0], of("a", 3));
        assert_eq!(returned.counts().failed, 1);
        drop(returned);
        let d = dials.of("d");
        d.count(AgentDial::Failed);
        assert_eq!(failed(&scrape), [of("b", 1), of("d", 1), of("other", 1)]);
        assert_eq!(series(&scrape).len(), 3 * OUTCOMES);
        drop((b, c));
    }

    #[test]
    fn an_id_is_a_short_label_without_control_characters_and_may_be_other() {
        let (dials, scrape) = book(3);
        let long = format!("\u{1b}[2J\n\"{}", "ä".repeat(600));
        let [hostile, other, third] = [long.as_str(), OTHER, "c"].map(|agent| dials.of(agent));
        assert!(label(&long).len() <= LABEL_BYTES_MAX);
        drop((hostile, other, third));
        for number in 0..10 {
            let _left = dials.of(&format!("n{number}"));
        }
        let text = scrape.text();
        assert!(!text.contains('\u{1b}'), "{text}");
        assert!(text.contains("agent=\"other\""), "{text}");
        assert!(series(&scrape).len() <= 4 * OUTCOMES, "{text}");
    }

    #[test]
    fn the_table_forgets_agents_without_links() {
        let (dials, _scrape) = book(0);
        for number in 0..10_000 {
            let _left = dials.of(&number.to_string());
        }
        assert!(dials.lock().linked.len() <= PRUNE_MIN + 1);
    }
}

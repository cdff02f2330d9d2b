//! The agents that a dial has asked, for logs.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use adit_core::failure::DialFailure;
use adit_core::ids::AgentId;

use adit_telemetry::labels::Path;

/// Limit on agents whose ids a dial records. The list lives as long as the tunnel, an id may have 1,024 bytes, and one
/// certificate may have many links that refuse each dial.
const ASKED_NAMES_MAX: usize = 8;

/// The agents that a dial has asked, in order. Clones share the list, so it outlives the dial.
#[derive(Clone, Debug, Default)]
pub struct AskedAgents(Arc<Mutex<AskedList>>);

#[derive(Debug, Default)]
struct AskedList {
    /// All attempts while the dial runs; afterwards the first few.
    attempts: Vec<AskedAgent>,
    count: usize,
    /// What the client's certificate names, for the servers that are asked.
    client: Option<Arc<str>>,
    /// The agent whose attempt decided that the dial failed.
    decisive: Option<Decisive>,
}

/// The agent whose attempt decided that a dial failed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Decisive {
    /// Its id.
    pub agent: AgentId,
    /// What it has proved.
    pub principal: Option<Arc<str>>,
    /// The path of the request.
    pub path: Path,
}

#[derive(Debug)]
struct AskedAgent {
    agent: AgentId,
    principal: Option<Arc<str>>,
    path: Path,
    failure: Option<DialFailure>,
}

impl AskedAgents {
    /// The dial is for the client of this name.
    pub fn set_client(&self, client: Arc<str>) {
        self.lock().client = Some(client);
    }

    /// The client's name; empty if it has none.
    pub(super) fn client(&self) -> String {
        let client = self.lock().client.clone();
        client.as_deref().unwrap_or_default().to_owned()
    }

    /// Records that an agent is asked; returns the number of the attempt.
    pub fn add(&self, agent: &AgentId, principal: Option<&Arc<str>>) -> usize {
        let mut asked = self.lock();
        let attempt = asked.count;
        asked.count += 1;
        asked.attempts.push(AskedAgent {
            agent: agent.clone(),
            principal: principal.cloned(),
            path: Path::Link,
            failure: None,
        });
        attempt
    }

    /// Records the path of an attempt's request.
    pub(super) fn on(&self, attempt: usize, path: Path) {
        if let Some(asked) = self.lock().attempts.get_mut(attempt) {
            asked.path = path;
        }
    }

    /// Records that an attempt failed.
    pub fn failed(&self, attempt: usize, failure: &DialFailure) {
        if let Some(asked) = self.lock().attempts.get_mut(attempt) {
            asked.failure = Some(failure.clone());
        }
    }

    /// The dial has ended, with `failure` if it failed. Keeps only the facts that are reported later.
    pub fn conclude(&self, failure: Option<&DialFailure>) {
        let mut asked = self.lock();
        if let Some(failure) = failure {
            let attempts = || asked.attempts.iter().rev();
            let decisive = attempts()
                .find(|attempt| attempt.failure.as_ref() == Some(failure))
                .or_else(|| attempts().find(|attempt| attempt.failure.is_none()))
                .or_else(|| attempts().next());
            asked.decisive = decisive.map(|attempt| Decisive {
                agent: attempt.agent.clone(),
                principal: attempt.principal.clone(),
                path: attempt.path,
            });
        }
        asked.attempts.truncate(ASKED_NAMES_MAX);
        asked.attempts.shrink_to_fit();
        for attempt in &mut asked.attempts {
            (attempt.failure, attempt.principal) = (None, None);
        }
    }

    fn lock(&self) -> MutexGuard<'_, AskedList> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The ids of the first 8 agents, separated by commas, and how many more there were.
    #[must_use]
    pub fn names(&self) -> String {
        let asked = self.lock();
        let first = asked.attempts.iter().take(ASKED_NAMES_MAX);
        let names: Vec<&str> = first.map(|attempt| attempt.agent.as_str()).collect();
        let more = asked.count - names.len();
        let names = names.join(",");
        match more {
            0 => names,
            more => format!("{names} and {more} more"),
        }
    }

    /// For a failed dial: the agent whose attempt decided that, and the path of the request. `None` if no agent was asked.
    #[must_use]
    pub fn decisive(&self) -> Option<Decisive> {
        self.lock().decisive.clone()
    }

    /// Number of attempts.
    #[must_use]
    pub fn len(&self) -> usize {
        self.lock().count
    }

    /// Whether no agent was asked.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Limit (operations): Agents named in an access event of one dial | 8, and the number of the others
    #[test]
    fn at_most_eight_asked_agents_of_a_dial_are_named() {
        let asked = AskedAgents::default();
        for number in 1..=8 {
            asked.add(&AgentId::new(&format!("a{number}")), None);
        }
        assert_eq!(asked.names(), "a1,a2,a3,a4,a5,a6,a7,a8");
        asked.add(&AgentId::new("a9"), None);
        asked.add(&AgentId::new("a10"), None);
        assert_eq!(asked.names(), "a1,a2,a3,a4,a5,a6,a7,a8 and 2 more");
        assert_eq!(asked.len(), 10);
        asked.conclude(None);
        assert_eq!(asked.names(), "a1,a2,a3,a4,a5,a6,a7,a8 and 2 more");
        assert_eq!(asked.decisive(), None, "the dial succeeded");
    }

    #[test]
    fn a_failed_dial_names_the_agent_that_decided_it() {
        let target = DialFailure::Target("refused".to_owned());
        let asked = AskedAgents::default();
        asked.conclude(Some(&DialFailure::NoAgent));
        assert_eq!(asked.decisive(), None, "no agent was asked");
        let rows = [
            // The agent's own failure, though another agent was asked later.
            (target.clone(), "a1", Path::Lane),
            (DialFailure::LinkLost, "a2", Path::Link),
            // The agent that had not answered yet.
            (DialFailure::TimedOut, "a3", Path::Link),
        ];
        for (failure, agent, path) in rows {
            let asked = AskedAgents::default();
            let principal = |name: &str| Some(Arc::from(format!("CN={name}")));
            let numbers = ["a1", "a2", "a3"]
                .map(|name| asked.add(&AgentId::new(name), principal(name).as_ref()));
            asked.on(numbers[0], Path::Lane);
            asked.failed(numbers[0], &target);
            asked.failed(numbers[1], &DialFailure::LinkLost);
            asked.conclude(Some(&failure));
            let decisive = asked.decisive();
            let expected = Decisive {
                agent: AgentId::new(agent),
                principal: principal(agent),
                path,
            };
            assert_eq!(decisive, Some(expected), "{failure}");
        }
    }
}

//! Addresses that names had last, and lookups under way: a name that many ask for is looked up once.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared, WeakShared};
use tokio::time::Instant;

use super::ResolveError;

/// Names in the list. When it is full of others, a name is looked up for each caller alone.
const NAMES_MAX: usize = 1024;

/// The addresses of a name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Found {
    /// Never empty.
    pub(super) ips: Vec<IpAddr>,
    /// Until then they may be reused.
    pub(super) until: Instant,
}

type Lookup = BoxFuture<'static, Result<Found, ResolveError>>;

/// The list. Clones name the same.
#[derive(Clone, Default)]
pub(super) struct Answers(Arc<Mutex<Names>>);

#[derive(Default)]
struct Names {
    /// Of the configuration that the entries are from.
    generation: u64,
    entries: HashMap<String, Entry>,
    serial: u64,
}

enum Entry {
    /// With the number of the lookup.
    UnderWay(u64, WeakShared<Lookup>),
    Known(Found),
}

/// What a caller has to wait for.
enum Next {
    Nothing(Vec<IpAddr>),
    Lookup(Shared<Lookup>),
}

impl Answers {
    /// The addresses of a name: those that it had last, or those of the lookup under way, which `ask` begins if there is none.
    /// A lookup goes on while one of its callers is there, and is dropped with the last one. Names of a smaller `generation` of
    /// the configuration are forgotten.
    ///
    /// # Errors
    /// The failure of the lookup, for all that wait for it.
    pub(super) async fn of<F>(
        &self,
        generation: u64,
        name: &str,
        ask: impl FnOnce() -> F,
    ) -> Result<Vec<IpAddr>, ResolveError>
    where
        F: Future<Output = Result<Found, ResolveError>> + Send + 'static,
    {
        match self.next(generation, name, ask) {
            Next::Nothing(ips) => Ok(ips),
            Next::Lookup(lookup) => lookup.await.map(|found| found.ips),
        }
    }

    fn next<F>(&self, generation: u64, name: &str, ask: impl FnOnce() -> F) -> Next
    where
        F: Future<Output = Result<Found, ResolveError>> + Send + 'static,
    {
        let mut names = self.locked();
        if names.generation < generation {
            names.entries.clear();
            names.generation = generation;
        }
        match names.entries.get(name) {
            Some(Entry::Known(found)) if found.until > Instant::now() => {
                return Next::Nothing(found.ips.clone());
            }
            Some(Entry::UnderWay(_, lookup)) => {
                if let Some(lookup) = lookup.upgrade() {
                    return Next::Lookup(lookup);
                }
            }
            Some(Entry::Known(_)) | None => (),
        }
        names.serial += 1;
        let mut landing = Landing {
            answers: self.clone(),
            name: name.to_owned(),
            serial: names.serial,
            found: None,
        };
        let asking = ask();
        let lookup = async move {
            let result = asking.await;
            landing.found = result.as_ref().ok().cloned();
            // Only now: what was found is in the list before any caller has it.
            drop(landing);
            result
        };
        let lookup = lookup.boxed().shared();
        if let Some(weak) = lookup.downgrade()
            && names.generation == generation
            && names.has_room_for(name)
        {
            let entry = Entry::UnderWay(names.serial, weak);
            names.entries.insert(name.to_owned(), entry);
        }
        Next::Lookup(lookup)
    }

    fn locked(&self) -> MutexGuard<'_, Names> {
        // Nothing panics while it is held; if it did, the list is still consistent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Names {
    /// Whether the name may be in the list; what is of no use any more is taken out when it is full.
    fn has_room_for(&mut self, name: &str) -> bool {
        if self.entries.len() < NAMES_MAX || self.entries.contains_key(name) {
            return true;
        }
        let now = Instant::now();
        self.entries.retain(|_, entry| match entry {
            Entry::UnderWay(..) => true,
            Entry::Known(found) => found.until > now,
        });
        self.entries.len() < NAMES_MAX
    }
}

/// Part of a lookup: once that is over, or dropped, the list has what it found instead of it.
struct Landing {
    answers: Answers,
    name: String,
    serial: u64,
    found: Option<Found>,
}

impl Drop for Landing {
    fn drop(&mut self) {
        let mut names = self.answers.locked();
        match names.entries.get(&self.name) {
            Some(Entry::UnderWay(serial, _)) if *serial == self.serial => (),
            // It was not in the list, or a newer one is.
            _ => return,
        }
        match self.found.take() {
            Some(found) => {
                let name = std::mem::take(&mut self.name);
                names.entries.insert(name, Entry::Known(found));
            }
            None => {
                names.entries.remove(&self.name);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};
    use std::net::Ipv4Addr;
    use std::time::Duration;

    use tokio::time::advance;

    use super::*;

    /// One address, which may be reused for ten seconds.
    fn found(last: u8) -> Result<Found, ResolveError> {
        Ok(Found {
            ips: ips(last),
            until: Instant::now() + Duration::from_secs(10),
        })
    }

    fn ips(last: u8) -> Vec<IpAddr> {
        vec![Ipv4Addr::new(10, 0, 0, last).into()]
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_is_reused_while_it_holds_and_a_failure_never() {
        let answers = Answers::default();
        let failed = || ready(Err(ResolveError::Misbehaving));
        assert_eq!(
            answers.of(0, "web.", failed).await,
            Err(ResolveError::Misbehaving)
        );
        assert_eq!(answers.of(0, "web.", || ready(found(1))).await, Ok(ips(1)));
        assert_eq!(answers.of(0, "web.", failed).await, Ok(ips(1)));
        assert_eq!(answers.of(0, "db.", || ready(found(2))).await, Ok(ips(2)));
        advance(Duration::from_secs(10)).await;
        assert_eq!(answers.of(0, "web.", || ready(found(3))).await, Ok(ips(3)));
    }

    #[tokio::test]
    async fn a_newer_configuration_forgets_the_names_of_the_old_one() {
        let answers = Answers::default();
        let ask = |last| move || ready(found(last));
        assert_eq!(answers.of(0, "web.", ask(1)).await, Ok(ips(1)));
        assert_eq!(answers.of(1, "web.", ask(2)).await, Ok(ips(2)));
        assert_eq!(answers.of(1, "web.", ask(3)).await, Ok(ips(2)));
    }

    #[tokio::test]
    async fn callers_of_one_name_share_a_lookup_that_outlives_the_first_of_them() {
        let answers = Answers::default();
        let (tell, told) = tokio::sync::oneshot::channel::<()>();
        let ask = || async move {
            let _told = told.await;
            found(1)
        };
        let mut first = Box::pin(answers.of(0, "web.", ask));
        assert!(futures_util::poll!(&mut first).is_pending());
        let mut second = Box::pin(answers.of(0, "web.", || ready(found(2))));
        assert!(futures_util::poll!(&mut second).is_pending());
        drop(first);
        tell.send(()).unwrap();
        assert_eq!(second.await, Ok(ips(1)));
    }

    #[tokio::test]
    async fn a_lookup_without_callers_is_dropped_and_the_next_one_begins_anew() {
        let answers = Answers::default();
        let alive = Arc::new(());
        let held = Arc::clone(&alive);
        let ask = || async move {
            let _held = held;
            pending().await
        };
        let mut only = Box::pin(answers.of(0, "web.", ask));
        assert!(futures_util::poll!(&mut only).is_pending());
        assert_eq!(Arc::strong_count(&alive), 2);
        drop(only);
        assert_eq!(Arc::strong_count(&alive), 1);
        assert!(answers.locked().entries.is_empty());
        assert_eq!(answers.of(0, "web.", || ready(found(2))).await, Ok(ips(2)));
    }

    /// Limit (peers): Names whose addresses are kept | 1,024 per resolver, 10 s each
    #[tokio::test(start_paused = true)]
    async fn the_list_is_bounded_and_old_answers_make_room() {
        let answers = Answers::default();
        for number in 0..NAMES_MAX + 10 {
            let name = format!("{number}.");
            assert_eq!(answers.of(0, &name, || ready(found(1))).await, Ok(ips(1)));
        }
        assert_eq!(answers.locked().entries.len(), NAMES_MAX);
        advance(Duration::from_secs(10)).await;
        assert_eq!(answers.of(0, "new.", || ready(found(2))).await, Ok(ips(2)));
        assert_eq!(answers.locked().entries.len(), 1);
    }
}

//! Addresses that names had last, and lookups under way: a name that many ask for is looked up once.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};

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

type Lookup = Shared<BoxFuture<'static, Result<Found, ResolveError>>>;
type WeakLookup = WeakShared<BoxFuture<'static, Result<Found, ResolveError>>>;

#[derive(Default)]
pub(super) struct Answers(Mutex<Names>);

#[derive(Default)]
struct Names {
    /// Of the configuration that the entries are from.
    generation: u64,
    entries: HashMap<String, Entry>,
}

enum Entry {
    /// Its callers hold the lookup.
    UnderWay(WeakLookup),
    /// It found addresses.
    Done(Lookup),
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
        let lookup = self.lookup(generation, name, ask);
        let result = lookup.clone().await;
        self.locked().end(name, lookup, result.is_ok());
        result.map(|found| found.ips)
    }

    fn lookup<F>(&self, generation: u64, name: &str, ask: impl FnOnce() -> F) -> Lookup
    where
        F: Future<Output = Result<Found, ResolveError>> + Send + 'static,
    {
        let mut names = self.locked();
        if names.generation < generation {
            names.entries.clear();
            names.generation = generation;
        }
        if let Some(lookup) = names.entries.get(name).and_then(Entry::current) {
            return lookup;
        }
        let lookup = ask().boxed().shared();
        if let Some(weak) = lookup.downgrade()
            && names.generation == generation
            && names.has_room_for(name)
        {
            names.entries.insert(name.to_owned(), Entry::UnderWay(weak));
        }
        lookup
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
        self.entries.retain(|_, entry| entry.current().is_some());
        self.entries.len() < NAMES_MAX
    }

    /// Keeps a lookup that found addresses, and forgets one that failed, unless the list has another one by now.
    fn end(&mut self, name: &str, lookup: Lookup, is_found: bool) {
        match self.entries.get_mut(name) {
            Some(entry) if entry.is_under_way(&lookup) => {
                if is_found {
                    *entry = Entry::Done(lookup);
                } else {
                    self.entries.remove(name);
                }
            }
            _ => (),
        }
    }
}

impl Entry {
    /// The lookup, unless all its callers gave up or what it found is too old.
    fn current(&self) -> Option<Lookup> {
        match self {
            Self::UnderWay(lookup) => lookup.upgrade(),
            Self::Done(lookup) => {
                let found = lookup.peek()?.as_ref().ok()?;
                (found.until > Instant::now()).then(|| lookup.clone())
            }
        }
    }

    fn is_under_way(&self, lookup: &Lookup) -> bool {
        match self {
            Self::UnderWay(weak) => weak.upgrade().is_some_and(|own| own.ptr_eq(lookup)),
            Self::Done(_) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};
    use std::net::Ipv4Addr;
    use std::sync::Arc;
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

    #[tokio::test]
    async fn lookups_without_callers_make_room() {
        let answers = Answers::default();
        for number in 0..NAMES_MAX {
            let name = format!("{number}.");
            let mut only = Box::pin(answers.of(0, &name, pending));
            assert!(futures_util::poll!(&mut only).is_pending());
        }
        assert_eq!(answers.of(0, "web.", || ready(found(1))).await, Ok(ips(1)));
        assert_eq!(answers.of(0, "web.", || ready(found(2))).await, Ok(ips(1)));
        assert_eq!(answers.locked().entries.len(), 1);
    }
}

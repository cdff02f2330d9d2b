//! Cached addresses of names, and the lookups under way: concurrent calls for one name share one lookup.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared, WeakShared};
use tokio::time::Instant;

use super::ResolveError;

/// Names in the cache. When it is full of current entries, each call for another name has a lookup of its own.
const NAMES_MAX: usize = 1024;

/// The addresses of a name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Found {
    /// Never empty.
    pub(super) ips: Vec<IpAddr>,
    /// When they expire.
    pub(super) until: Instant,
}

type Lookup = Shared<BoxFuture<'static, Result<Found, ResolveError>>>;
type WeakLookup = WeakShared<BoxFuture<'static, Result<Found, ResolveError>>>;

/// Addresses of names. The DNS library caches whole messages, up to 64 KiB each and several for a name, so it keeps few.
#[derive(Default)]
pub(super) struct AddressCache(Mutex<CacheEntries>);

#[derive(Default)]
struct CacheEntries {
    /// Generation of the configuration that the entries are from.
    generation: u64,
    by_name: HashMap<String, CacheEntry>,
}

enum CacheEntry {
    /// The callers own the lookup.
    UnderWay(WeakLookup),
    /// The lookup found addresses.
    Done(Lookup),
}

impl AddressCache {
    /// The cached addresses of a name, or the result of the lookup under way. Without either, `ask` starts a lookup. A
    /// lookup goes on while one of its callers waits, and is dropped with the last one. A greater `generation` of the
    /// configuration empties the cache.
    ///
    /// # Errors
    /// The failure of the lookup, for all its callers.
    pub(super) async fn get_or_ask<F>(
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
        let mut cache = self.locked();
        if cache.generation < generation {
            cache.by_name.clear();
            cache.generation = generation;
        }
        if let Some(lookup) = cache.by_name.get(name).and_then(CacheEntry::current) {
            return lookup;
        }
        let lookup = ask().boxed().shared();
        if let Some(weak) = lookup.downgrade()
            && cache.generation == generation
            && cache.has_room_for(name)
        {
            cache
                .by_name
                .insert(name.to_owned(), CacheEntry::UnderWay(weak));
        }
        lookup
    }

    fn locked(&self) -> MutexGuard<'_, CacheEntries> {
        // No code panics while it holds the lock; if it did, the entries are still consistent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CacheEntries {
    /// Whether the name may be in the cache. Entries of no use are removed when the cache is full.
    fn has_room_for(&mut self, name: &str) -> bool {
        if self.by_name.len() < NAMES_MAX || self.by_name.contains_key(name) {
            return true;
        }
        self.by_name.retain(|_, entry| entry.current().is_some());
        self.by_name.len() < NAMES_MAX
    }

    /// Keeps a lookup that found addresses, and removes one that failed, unless the cache has a newer one for the name.
    fn end(&mut self, name: &str, lookup: Lookup, is_found: bool) {
        match self.by_name.get_mut(name) {
            Some(entry) if !entry.is_under_way(&lookup) => (),
            Some(entry) if is_found => *entry = CacheEntry::Done(lookup),
            _ => drop(self.by_name.remove(name)),
        }
    }
}

impl CacheEntry {
    /// The lookup, unless all its callers gave up or its addresses are too old.
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
    use std::future::{Ready, pending, ready};
    use std::net::Ipv4Addr;
    use std::sync::Arc;
    use std::time::Duration;

    use tokio::time::advance;

    use super::*;

    /// One address that may be reused for ten seconds.
    fn found(last: u8) -> Result<Found, ResolveError> {
        Ok(Found {
            ips: ips(last),
            until: Instant::now() + Duration::from_secs(10),
        })
    }

    fn ips(last: u8) -> Vec<IpAddr> {
        vec![Ipv4Addr::new(10, 0, 0, last).into()]
    }

    /// A lookup that finds this address.
    fn answer(last: u8) -> impl FnOnce() -> Ready<Result<Found, ResolveError>> {
        move || ready(found(last))
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_is_reused_until_it_expires_and_a_failure_never() {
        let cache = AddressCache::default();
        let failed = || ready(Err(ResolveError::Misbehaving));
        let failure = cache.get_or_ask(0, "web.", failed).await;
        assert_eq!(failure, Err(ResolveError::Misbehaving));
        assert_eq!(cache.get_or_ask(0, "web.", answer(1)).await, Ok(ips(1)));
        assert_eq!(cache.get_or_ask(0, "web.", failed).await, Ok(ips(1)));
        assert_eq!(cache.get_or_ask(0, "db.", answer(2)).await, Ok(ips(2)));
        advance(Duration::from_secs(10)).await;
        assert_eq!(cache.get_or_ask(0, "web.", answer(3)).await, Ok(ips(3)));
    }

    #[tokio::test]
    async fn a_newer_configuration_forgets_the_names_of_the_old_one() {
        let cache = AddressCache::default();
        assert_eq!(cache.get_or_ask(0, "web.", answer(1)).await, Ok(ips(1)));
        assert_eq!(cache.get_or_ask(1, "web.", answer(2)).await, Ok(ips(2)));
        assert_eq!(cache.get_or_ask(1, "web.", answer(3)).await, Ok(ips(2)));
    }

    #[tokio::test]
    async fn callers_of_one_name_share_a_lookup_that_outlives_the_first_of_them() {
        let cache = AddressCache::default();
        let (tell, told) = tokio::sync::oneshot::channel::<()>();
        let ask = || async move {
            let _told = told.await;
            found(1)
        };
        let mut first = Box::pin(cache.get_or_ask(0, "web.", ask));
        assert!(futures_util::poll!(&mut first).is_pending());
        let mut second = Box::pin(cache.get_or_ask(0, "web.", || ready(found(2))));
        assert!(futures_util::poll!(&mut second).is_pending());
        drop(first);
        tell.send(()).unwrap();
        assert_eq!(second.await, Ok(ips(1)));
    }

    #[tokio::test]
    async fn a_lookup_without_callers_is_dropped_and_the_next_one_begins_anew() {
        let cache = AddressCache::default();
        let alive = Arc::new(());
        let held = Arc::clone(&alive);
        let ask = || async move {
            let _held = held;
            pending().await
        };
        let mut only = Box::pin(cache.get_or_ask(0, "web.", ask));
        assert!(futures_util::poll!(&mut only).is_pending());
        assert_eq!(Arc::strong_count(&alive), 2);
        drop(only);
        assert_eq!(Arc::strong_count(&alive), 1);
        assert_eq!(cache.get_or_ask(0, "web.", answer(2)).await, Ok(ips(2)));
    }

    /// Limit (peers): Names whose addresses are kept | 1,024 per resolver, 10 s each
    #[tokio::test(start_paused = true)]
    async fn the_cache_is_bounded_and_expired_addresses_make_room() {
        let cache = AddressCache::default();
        for number in 0..NAMES_MAX + 10 {
            let name = format!("{number}.");
            assert_eq!(cache.get_or_ask(0, &name, answer(1)).await, Ok(ips(1)));
        }
        assert_eq!(cache.locked().by_name.len(), NAMES_MAX);
        advance(Duration::from_secs(10)).await;
        assert_eq!(cache.get_or_ask(0, "new.", answer(2)).await, Ok(ips(2)));
        assert_eq!(cache.locked().by_name.len(), 1);
    }

    #[tokio::test]
    async fn lookups_without_callers_make_room() {
        let cache = AddressCache::default();
        for number in 0..NAMES_MAX {
            let name = format!("{number}.");
            let mut only = Box::pin(cache.get_or_ask(0, &name, pending));
            assert!(futures_util::poll!(&mut only).is_pending());
        }
        assert_eq!(cache.get_or_ask(0, "web.", answer(1)).await, Ok(ips(1)));
        assert_eq!(cache.get_or_ask(0, "web.", answer(2)).await, Ok(ips(1)));
        assert_eq!(cache.locked().by_name.len(), 1);
    }
}

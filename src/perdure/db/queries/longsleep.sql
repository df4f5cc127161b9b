-- name: candidates
-- Sleepers of a node of which something may have to be done, in the order of their ids after one of them. Broader than the policy,
-- which is decided on each row in its turn.
select id from workspaces
where node_id = %(node_id)s and state = 'hibernated' and asleep_action <> 'keep' and id > %(after)s
  and state_changed_at <= perdure_now()
      - make_interval(secs => 86400 * (asleep_after_days - case asleep_action when 'delete' then 1 else 0 end))
  and not (asleep_action = 'archive' and asleep_noted is not distinct from generation)
order by id
limit %(limit)s;

-- name: note
-- What was done about, or told of, the sleep that it is in; refused (no row) when it is not in that any more.
update workspaces set asleep_noted = generation, asleep_noted_at = perdure_now()
where id = %(id)s and generation = %(generation)s and state = 'hibernated'
returning asleep_noted_at, journal_append(tenant_id, id, %(kind)s, generation, %(body)s) as seq;

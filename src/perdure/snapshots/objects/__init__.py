"""The second home of snapshots and images: an object store (DESIGN D12).

``client`` speaks to the store, ``keys`` holds the tenants' keys, ``packs`` is the format of an object full of chunks, ``chunks``
cuts content and puts it together again, ``manifest`` says of which chunks an item consists, ``upload``, ``download`` and
``collect`` move and remove. Rows that decide are kept elsewhere: ``wire.objects``. How it holds together:
docs/object-store.md.
"""
